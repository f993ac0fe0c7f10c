"""Compressed files are read up to a limit of what comes out of them."""

import gzip
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blockpilot.core.compressed import read_lines, read_unpacked
from blockpilot.core.errors import InputError

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write(folder: Path, suffix: str, data: bytes) -> Path:
    path = folder / f"file{suffix}"
    path.write_bytes(PACK[suffix](data))
    return path


@pytest.mark.parametrize("suffix", PACK)
def test_what_fits_is_read_whole(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, b"one\n\ntwo")
    assert read_unpacked(path, 8) == b"one\n\ntwo"
    assert list(read_lines(path, most=8)) == [b"one\n", b"\n", b"two"]


@pytest.mark.parametrize("suffix", PACK)
def test_limits_are_those_of_what_comes_out(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, b"one\ntwo\n")
    with pytest.raises(InputError, match=r"file.* holds more than .* split it into several files"):
        read_unpacked(path, 7)
    lines = read_lines(path, most=7)
    assert next(lines) == b"one\n"
    with pytest.raises(InputError, match="split it into several files"):
        next(lines)
    with pytest.raises(InputError, match=r"line 1: longer than .*; split the file into shorter lines"):
        list(read_lines(path, most=100, longest=3))


def test_one_endless_line_takes_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path, ".gz", bytes(400 << 20))
    for source in (path, Path("/dev/zero")):
        tracemalloc.start()
        with pytest.raises(InputError, match="line 1: longer than 16 MB"):
            list(read_lines(source, most=256 << 20))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damage_is_one_line(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, bytes(range(256)) * 40)
    whole = path.read_bytes()
    for damaged in (b"nonsense", whole[:-9], whole[:30], whole[:40] + b"\xff" * 20 + whole[60:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read: ") as caught:
            read_unpacked(path, 1 << 20)
        assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gz", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read: "):
            read_unpacked(path, 10)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("filler", ["zeros", "empty parts"])
def test_what_holds_nothing_is_not_read_for_ever(tmp_path: Path, suffix: str, filler: str) -> None:
    path = write(tmp_path, suffix, b"one\n")
    with path.open("ab") as file:
        if filler == "zeros":
            file.truncate(3 << 30)
        else:
            file.write(PACK[suffix](b"") * (1 << 18))
    for read in (lambda: read_unpacked(path, 1 << 20), lambda: list(read_lines(path, most=1 << 20))):
        with pytest.raises(InputError, match=r"cannot be read: .*it is padded|ended before the end-of-stream"):
            read()


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_what_packing_cannot_make_smaller_is_read(tmp_path: Path, suffix: str) -> None:
    data = np.random.default_rng(0).bytes(9 << 20)
    assert read_unpacked(write(tmp_path, suffix, data), 16 << 20) == data
    assert b"".join(read_lines(tmp_path / f"file{suffix}", most=16 << 20)) == data
