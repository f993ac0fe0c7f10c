"""Checksums are computed again only of files that have changed."""

import hashlib
import os
from pathlib import Path

import pytest

from blockpilot.core import checksums
from blockpilot.core.checksums import is_intact, is_verified, write_list
from blockpilot.core.files import hash_file

CONTENT = b"weights" * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, model_cache: Path) -> list[Path]:
    """The files that are read, one entry each time."""
    found: list[Path] = []

    def count(path: Path) -> str:
        found.append(path)
        return hash_file(path)

    monkeypatch.setattr(checksums, "hash_file", count)
    return found


def write(folder: Path, content: bytes = CONTENT) -> Path:
    """A file that was written long ago."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_what_was_right_is_remembered(tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    path = write(tmp_path)
    assert [is_verified(path, SHA256) for _ in range(3)] == [True] * 3
    assert hashed == [path]
    assert not is_verified(path, "0" * 64)


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path, hashed: list[Path]) -> None:
    path = write(tmp_path)
    assert is_verified(path, SHA256) and is_verified(path, SHA256)
    assert hashed == [path, path]


def test_a_change_is_noticed_with_the_same_size_and_time(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    assert is_verified(write(tmp_path), SHA256)
    path = write(tmp_path, CONTENT[::-1])
    assert not is_verified(path, SHA256) and not is_verified(path, SHA256)
    assert len(hashed) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff" * 100, b"[" * 10**5])
def test_a_damaged_memory_costs_time_alone(
    tmp_path: Path, hashed: list[Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    model_cache.mkdir()
    (model_cache / "verified.json").write_bytes(content)
    path = write(tmp_path)
    assert is_verified(path, SHA256) and is_verified(path, SHA256)
    assert hashed == [path]


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "file" / "below"))
    path = write(tmp_path)
    assert is_verified(path, SHA256) and is_verified(path, SHA256)
    assert hashed == [path, path]


def test_files_that_are_gone_are_forgotten(
    tmp_path: Path, hashed: list[Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    first = write(tmp_path)
    assert is_verified(first, SHA256)
    first.rename(tmp_path / "second")
    assert is_verified(tmp_path / "second", SHA256)
    assert str(first) not in (model_cache / "verified.json").read_text()


def test_a_folder_is_intact_while_its_files_are_those_of_the_list(tmp_path: Path, hashed: list[Path]) -> None:
    assert not is_intact(tmp_path / "absent") and not is_intact(tmp_path)
    path = write(tmp_path)
    write_list(tmp_path)
    assert is_intact(tmp_path)
    write(tmp_path, CONTENT[::-1])
    assert not is_intact(tmp_path)
    path.unlink()
    assert not is_intact(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"a": 1}', b'{"": ""}', b'{"../model.gguf": ""}'])
def test_a_folder_with_a_damaged_list_is_not_intact(tmp_path: Path, hashed: list[Path], content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "checksums.json").write_bytes(content)
    assert not is_intact(tmp_path)
