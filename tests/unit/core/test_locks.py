"""One process works in a folder at a time, and whoever comes second is told who holds it."""

import contextlib
import errno
import fcntl
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockpilot.core import locks
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.locks import LOCK, command_name, hold_folder

PROGRAM = """
import sys
from pathlib import Path
from blockpilot.core.locks import hold_folder
with hold_folder(Path(sys.argv[1]), "blockpilot collect"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the folder until its input ends."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(locks.__file__).parents[2])}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **streams) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
        process.wait(timeout=60)


def test_the_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(InputError) as caught, hold_folder(tmp_path, "blockpilot bench"):
            raise AssertionError("two hold the folder")
        who = rf"blockpilot collect \(process {process.pid} on {re.escape(platform.node())}, since 20\d\d-.* ..:..:..\)"
        line = rf"{tmp_path} is in use by {who}; wait for it, or choose another --out"
        assert re.fullmatch(line, str(caught.value))
    with hold_folder(tmp_path, "blockpilot bench"):
        assert os.listdir(tmp_path) == [LOCK]
    assert os.listdir(tmp_path) == []


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait(timeout=60)
        assert os.listdir(tmp_path) == [LOCK]
        with hold_folder(tmp_path, "blockpilot bench"):
            pass
    assert os.listdir(tmp_path) == []


def test_a_new_folder_that_nothing_came_of_is_removed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="refused"), hold_folder(tmp_path / "new", "a test"):
        raise InputError("refused")
    assert not (tmp_path / "new").exists()
    with hold_folder(tmp_path / "new", "a test"):
        (tmp_path / "new" / "file").write_text("")
    assert os.listdir(tmp_path / "new") == ["file"]
    (tmp_path / "old").mkdir()
    with hold_folder(tmp_path / "old", "a test"):
        pass
    assert (tmp_path / "old").is_dir()


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".shard.12345678.part").write_text("half")
    with hold_folder(tmp_path, "a test"):
        assert os.listdir(tmp_path) == [LOCK]


def test_a_lock_file_that_its_holder_removes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking the last holder goes: a third process would not see the file that we had locked."""
    real, opened = locks._open, list[int]()

    def removed_at_first(path: Path) -> int:
        opened.append(real(path))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(locks, "_open", removed_at_first)
    with hold_folder(tmp_path, "a test"):
        assert len(opened) == 2 and os.path.samestat(os.stat(tmp_path / LOCK), os.fstat(opened[1]))
        with pytest.raises(InputError, match=f"is in use by a test .process {os.getpid()} "):
            hold_folder(tmp_path, "another").__enter__()


def test_a_folder_that_its_holder_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = locks._open, list[Path]()

    def removed_at_first(path: Path) -> int:
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        return real(path)

    monkeypatch.setattr(locks, "_open", removed_at_first)
    with hold_folder(tmp_path / "new", "a test"):
        assert len(calls) == 2 and (tmp_path / "new" / LOCK).is_file()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"what": "x"}'])
def test_a_holder_that_says_nothing_is_another_process(tmp_path: Path, content: bytes) -> None:
    with (tmp_path / LOCK).open("wb") as file:
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use by another process; wait"):
            hold_folder(tmp_path, "a test").__enter__()


def test_a_lock_needs_no_room_for_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, what: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locks, "_write_note", fail)
    with hold_folder(tmp_path, "a test"):
        assert (tmp_path / LOCK).read_bytes() == b""


@pytest.mark.parametrize(("code", "exit_code"), [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_a_folder_that_takes_no_lock_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    def fail(path: Path) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks, "_open", fail)
    with pytest.raises(BlockPilotError, match="cannot write in folder") as caught:
        hold_folder(tmp_path, "a test").__enter__()
    assert caught.value.exit_code == exit_code


def test_where_nothing_can_be_locked_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with hold_folder(tmp_path, "a test"):
        (tmp_path / "file").write_text("")
    assert "cannot be locked (No locks available): nothing else may write there now" in caplog.text


def test_a_command_is_named_by_its_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/blockpilot", "collect", "--out", "x"])
    assert command_name() == "blockpilot collect"
