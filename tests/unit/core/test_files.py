"""Files are read up to a limit, take their name when they are whole, and are on the disk before that."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from blockpilot.core import files
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import (
    append_text,
    atomic_path,
    ensure_folder,
    hash_file,
    read_bytes,
    read_text,
    remove_for_good,
    remove_leftovers,
    sync_folder,
    unfinished_folder,
    write_text,
)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What reaches the disk, in order: (function, the file's name)."""
    found: list[tuple[str, str]] = []

    def watch(name: str) -> None:
        real = getattr(files, name)

        def call(*given: Any) -> Any:
            found.append((name, given[-1].name if name == "_rename" else given[0].name))
            return real(*given)

        monkeypatch.setattr(files, name, call)

    for name in ("_create", "_write", "_append", "_sync", "_rename", "_make_folder"):
        watch(name)
    return found


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def call(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, name, call)


def test_write_creates_the_folder_and_replaces_the_file(tmp_path):
    target = tmp_path / "a" / "b.txt"
    write_text(target, "one")
    write_text(target, "grün")
    assert target.read_text(encoding="utf-8") == "grün"
    assert os.listdir(target.parent) == ["b.txt"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, operations):
    write_text(tmp_path / "new.txt", "text")
    names = [name for name, _ in operations]
    assert names == ["_create", "_write", "_sync", "_rename", "_sync"]
    assert operations[2] == ("_sync", operations[1][1]) and operations[4] == ("_sync", tmp_path.name)


def test_folders_are_on_the_disk_before_files_in_them(tmp_path, operations):
    ensure_folder(tmp_path / "a" / "b")
    assert operations == [("_make_folder", "a"), ("_sync", tmp_path.name), ("_make_folder", "b"), ("_sync", "a")]
    operations.clear()
    ensure_folder(tmp_path / "a" / "b")
    assert operations == []


def test_lines_are_on_the_disk_when_they_were_added(tmp_path, operations):
    path = tmp_path / "log.jsonl"
    append_text(path, "one\n")
    append_text(path, "grün\n")
    assert path.read_text(encoding="utf-8") == "one\ngrün\n"
    first = [("_append", path.name), ("_sync", path.name), ("_sync", tmp_path.name)]
    assert operations == [*first, ("_append", path.name), ("_sync", path.name)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interruption_leaves_nothing(tmp_path, error):
    with pytest.raises(error), atomic_path(tmp_path / "new.bin") as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert os.listdir(tmp_path) == []


def test_interruption_keeps_the_old_file(tmp_path):
    target = tmp_path / "old.txt"
    write_text(target, "old")
    with pytest.raises(KeyboardInterrupt), atomic_path(target) as temporary:
        temporary.write_text("half of the new")
        assert target.read_text() == "old"
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["old.txt"]


def test_full_disk_is_one_clear_line(tmp_path):
    with pytest.raises(BlockPilotError, match=r"cannot write .*No space left"), atomic_path(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["_create", "_make_folder"])
@pytest.mark.parametrize(("code", "exit_code"), [(errno.ENOSPC, 1), (errno.EIO, 1), (errno.EACCES, 2)])
def test_only_a_place_that_the_user_can_change_is_bad_input(tmp_path, monkeypatch, name, code, exit_code):
    fail(monkeypatch, name, code)
    with pytest.raises(BlockPilotError, match="cannot") as caught:
        write_text(tmp_path / "folder" / "x" if name == "_make_folder" else tmp_path / "x", "text")
    assert caught.value.exit_code == exit_code
    assert ("choose another place" in str(caught.value)) == (exit_code == 2)


def test_an_error_says_whether_the_file_is_still_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "x"
    write_text(target, "old")
    fail(monkeypatch, "_rename", errno.EIO)
    with pytest.raises(BlockPilotError, match="the file was left as it was"):
        write_text(target, "new")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["x"]
    monkeypatch.undo()
    fail(monkeypatch, "sync_folder", errno.EIO)
    with pytest.raises(BlockPilotError, match="a power cut may undo it"):
        write_text(target, "new")
    assert target.read_text() == "new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["_append", "_sync"])
def test_a_line_that_does_not_fit_is_an_error(tmp_path, monkeypatch, name):
    fail(monkeypatch, name, errno.ENOSPC)
    with pytest.raises(BlockPilotError, match=r"cannot write .*log: No space left on device$"):
        append_text(tmp_path / "log", "line\n")


def test_file_systems_that_cannot_sync_folders_will_do(tmp_path, monkeypatch):
    fail(monkeypatch, "_sync", errno.EINVAL)
    sync_folder(tmp_path)
    fail(monkeypatch, "_sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_target_that_is_a_folder(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(BlockPilotError, match="cannot write"):
        write_text(tmp_path / "taken", "text")
    assert os.listdir(tmp_path) == ["taken"]


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for name in ("file", "file/below", "nul\0", "x" * 300):
        with pytest.raises(InputError, match="cannot create folder"):
            ensure_folder(tmp_path / name)


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(InputError, match="cannot write in folder"):
        write_text(tmp_path / "nul\0", "text")
    with pytest.raises(InputError, match="cannot be read"):
        read_bytes(tmp_path / "nul\0")


def test_reads_are_bounded(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10)
    assert read_bytes(path, 10) == b"x" * 10
    with pytest.raises(InputError, match="is larger than"):
        read_bytes(path, 9)
    with pytest.raises(InputError, match="/dev/zero is larger than 1 MB"):
        read_bytes(Path("/dev/zero"), files.MEGABYTE)
    with pytest.raises(InputError, match="gone cannot be read: No such file or directory"):
        read_bytes(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_bytes(tmp_path)


def test_text_is_utf8(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"gr\xfcn")
    with pytest.raises(InputError, match=r"is not UTF-8 text \(invalid start byte at byte 2\)"):
        read_text(path)


def test_only_regular_files_have_a_checksum(tmp_path):
    with pytest.raises(InputError, match="is no file"):
        hash_file(tmp_path)
    (tmp_path / "empty").touch()
    assert hash_file(tmp_path / "empty").startswith("e3b0c442")


def test_what_would_mislead_is_gone_for_good_or_an_error(tmp_path, monkeypatch, operations):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    remove_for_good(tmp_path, [tmp_path / "a"])
    assert os.listdir(tmp_path) == ["b"] and operations == [("_sync", tmp_path.name)]
    fail(monkeypatch, "_remove", errno.EACCES)
    with pytest.raises(BlockPilotError, match=r"cannot remove old files from .*: Permission denied; empty it"):
        remove_for_good(tmp_path, [tmp_path / "b"])


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    kept = {".hidden.part", "name.part", ".a.short.part", ".lock", "data"}
    for name in (*kept, ".a.12345678.part", ".b.txt.abcdefg_.part"):
        (tmp_path / name).write_text("")
    folder = unfinished_folder(tmp_path / "model")
    (folder / "half").write_text("")
    (tmp_path / ".link.12345678.part").symlink_to(tmp_path / "data")
    remove_leftovers(tmp_path, "a")
    assert set(os.listdir(tmp_path)) == kept | {".b.txt.abcdefg_.part", folder.name, ".link.12345678.part"}
    remove_leftovers(tmp_path, days=1)
    assert folder.is_dir()
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == kept


def test_names_of_leftovers_are_no_patterns(tmp_path):
    (tmp_path / ".a.12345678.part").write_text("")
    remove_leftovers(tmp_path, "[a]")
    remove_leftovers(tmp_path, "?")
    assert os.listdir(tmp_path) == [".a.12345678.part"]


def test_an_unfinished_folder_lies_beside_its_place(tmp_path):
    folder = unfinished_folder(tmp_path / "model")
    assert folder.is_dir() and folder.parent == tmp_path and folder.name.startswith(".model.")
    with pytest.raises(InputError, match="cannot write in folder"):
        unfinished_folder(tmp_path / "gone" / "model")
