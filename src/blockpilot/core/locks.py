"""One process works in a folder at a time: the second is told who holds it.

The lock is the operating system's, so a process that is killed lets go of it. The file only says who it was.
"""

import contextlib
import fcntl
import logging
import os
import platform
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from blockpilot.core.errors import InputError
from blockpilot.core.files import (
    ensure_folder,
    make_names_safe,
    reason_of,
    refusal,
    remove_empty_folder,
    remove_file,
    remove_leftovers,
)

LOCK = ".lock"
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_folder(folder: Path, what: str) -> Iterator[None]:
    """Keep others out of `folder`, which is created, while the block runs; `what` says to them who works there.

    What killed runs have left half-written is removed, and names that they had not yet made safe are made so.
    """
    is_new = not folder.exists()
    handle = _acquire(ensure_folder(folder))
    if handle is None:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # who it was is told where there is room for it
            _write_note(handle, what)
        remove_leftovers(folder)
        make_names_safe(folder)
        yield
    finally:
        try:
            remove_file(folder / LOCK)  # first: whoever has opened it sees that it is gone, and tries again
        finally:
            os.close(handle)
        if is_new:
            remove_empty_folder(folder)  # nothing has come of the run


def _write_note(handle: int, what: str) -> None:
    holder = {"what": what, "process": os.getpid(), "machine": platform.node(), "since": f"{datetime.now():%F %T}"}
    os.ftruncate(handle, 0)
    os.pwrite(handle, msgspec.json.encode(holder), 0)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _acquire(folder: Path) -> int | None:
    """The open lock file; None where the file system knows no locks."""
    path = folder / LOCK
    while True:
        try:
            handle = _open(path)
        except FileNotFoundError:
            ensure_folder(folder)  # another process has just removed it: nothing had come of its run
            continue
        except OSError as error:
            raise refusal(f"cannot write in folder {folder}", error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(handle, path):
                return handle
            os.close(handle)
        except BlockingIOError as error:
            holder = _describe(handle)
            os.close(handle)
            raise InputError(f"{folder} is in use by {holder}; wait for it, or choose another --out") from error
        except OSError as error:
            os.close(handle)
            logger.warning("%s cannot be locked (%s): nothing else may write there now", folder, reason_of(error))
            return None


def _is_same(handle: int, path: Path) -> bool:
    """Whether the open file still has its name: its last holder may just have removed it."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _describe(handle: int) -> str:
    try:
        holder: dict[str, Any] = msgspec.json.decode(os.pread(handle, 4096, 0), type=dict[str, Any])
        return "{what} (process {process} on {machine}, since {since})".format(**holder)
    except (msgspec.DecodeError, KeyError, OSError, UnicodeError):
        return "another process"


def command_name() -> str:
    """How a verb names itself to others: `blockpilot collect`."""
    return " ".join(["blockpilot", *sys.argv[1:2]])
