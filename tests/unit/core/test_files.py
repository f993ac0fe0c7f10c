import os

import pytest

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import atomic_path, ensure_folder, write_text


def test_write_creates_the_folder_and_replaces_the_file(tmp_path):
    target = tmp_path / "a" / "b.txt"
    write_text(target, "one")
    write_text(target, "grün")
    assert target.read_text(encoding="utf-8") == "grün"
    assert os.listdir(target.parent) == ["b.txt"]
    assert target.stat().st_mode & 0o777 == 0o644


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


def test_target_that_is_a_folder(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(BlockPilotError, match="cannot write"):
        write_text(tmp_path / "taken", "text")
    assert os.listdir(tmp_path) == ["taken"]


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot create folder"):
        ensure_folder(tmp_path / "file" / "below")
