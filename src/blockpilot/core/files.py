"""Files: read up to a limit; written whole or not at all, and on the disk before they take their name.

All that the verbs read and write passes through here, so that tests can let any of it fail (`tests/faults`). What a
library opens by itself is announced.
"""

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from blockpilot.core.errors import BlockPilotError, InputError

MEGABYTE = 1 << 20
MAX_BYTES = 256 * MEGABYTE  # of a file that is read whole, unless its reader knows better
_PIECE = 64 * MEGABYTE  # read at once: memory follows what is there, not what might be
_DAY = 24 * 3600.0
_UNFINISHED = ".part"  # the end of names of temporary files
_RANDOM = "?" * 8  # what `tempfile` puts before it
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # another place need not be better
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOTSUP)  # file systems that know no sync of folders


def ensure_folder(folder: Path) -> Path:
    """Create `folder`, so that a power cut does not take it; one clear line when that is not possible."""
    try:
        if not folder.is_dir():
            for path in [path for path in (folder, *folder.parents) if not path.exists()][::-1] or [folder]:
                _make_folder(path)
                sync_folder(path.parent)
    except (OSError, ValueError) as error:
        raise refusal(f"cannot create folder {folder}", error) from error
    return folder


def refusal(what: str, error: Exception) -> BlockPilotError:
    """The error for a place that takes no files: the user's choice, or a disk that is full or broken."""
    if getattr(error, "errno", None) in _NO_ROOM:
        return BlockPilotError(f"{what}: {reason_of(error)}")
    return InputError(f"{what}: {reason_of(error)}; choose another place")


def reason_of(error: Exception) -> str:
    """Why a file could not be used, without its name."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def announce_read(path: Path) -> None:
    """To be called before a library opens a file by itself; an OSError says that it cannot be read."""
    _look(path)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """All of a file. A larger one than `most`, or one without an end, is refused before it fills the memory."""
    try:
        data = _read(path, most + 1) if path.stat().st_size <= most else None  # of a pipe nobody knows the size
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from error
    if data is None or len(data) > most:
        raise InputError(f"{path} is larger than {most / MEGABYTE:.0f} MB, the most that such a file may have")
    return data


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the target's folder; it takes the target's name only if the block succeeds."""
    ensure_folder(target.parent)
    try:
        temporary = _create(target)
    except (OSError, ValueError) as error:
        raise refusal(f"cannot write in folder {target.parent}", error) from error
    try:
        yield temporary
        temporary.chmod(0o644)
        _sync(temporary)
        _rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        state = "the file was left as it was" if temporary.exists() else "a power cut may undo it"
        raise BlockPilotError(f"cannot write {target}: {reason_of(error)}; {state}") from error
    finally:
        remove_file(temporary)


def write_bytes(target: Path, data: bytes) -> None:
    with atomic_path(target) as temporary:
        _write(temporary, data)


def write_text(target: Path, text: str) -> None:
    write_bytes(target, text.encode("utf-8"))


def append_text(path: Path, text: str) -> None:
    """Add to a file that only grows; on the disk when this returns. A crash may leave the last line cut off."""
    ensure_folder(path.parent)
    try:
        is_new = not path.exists()
        _append(path, text.encode("utf-8"))
        _sync(path)
        if is_new:
            sync_folder(path.parent)
    except OSError as error:
        raise BlockPilotError(f"cannot write {path}: {reason_of(error)}") from error


def sync_folder(folder: Path) -> None:
    """From here on the names in it survive a power cut, wherever the file system can promise that."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def make_names_safe(folder: Path) -> None:
    """Those in a folder, and those on the way to it: a run that was killed may have made them and got no further."""
    try:
        for path in (folder, *folder.resolve().parents):
            sync_folder(path)
    except OSError as error:
        raise refusal(f"cannot write in folder {folder}", error) from error


def remove_file(path: Path) -> None:
    """If it is there and can be removed: nothing depends on it."""
    with contextlib.suppress(OSError):
        if path.exists():
            _remove(path)


def remove_for_good(folder: Path, paths: Iterable[Path]) -> None:
    """Files of a folder whose presence would mislead; a power cut does not bring them back."""
    try:
        for path in paths:
            _remove(path)
        sync_folder(folder)
    except OSError as error:
        raise BlockPilotError(f"cannot remove old files from {folder}: {reason_of(error)}; empty it") from error


def remove_empty_folder(folder: Path) -> None:
    """If it is empty: one that holds files stays."""
    with contextlib.suppress(OSError):
        _remove_folder(folder)


def remove_leftovers(folder: Path, name: str = "", *, days: float = 0) -> None:
    """Temporary files, of all names or of one, which runs have left that were killed. Where others may be at work, with
    an age in days that none of theirs has."""
    for path in folder.glob(f".{glob.escape(name) or '*'}.{_RANDOM}{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= days * _DAY:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else _remove(path)


def unfinished_folder(target: Path) -> Path:
    """A new folder beside `target`, to be filled and renamed."""
    try:
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_UNFINISHED, dir=target.parent))
    except (OSError, ValueError) as error:
        raise refusal(f"cannot write in folder {target.parent}", error) from error


def hash_file(path: Path) -> str:
    """Of a regular file: a pipe or a device may have no end."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is no file")
        announce_read(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from error


# What touches the disk. Tests put functions in their place that fail at the nth call (tests/faults).


def _look(path: Path) -> None:
    os.stat(path)


def _read(path: Path, most: int) -> bytes:
    pieces, left = [], most
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, _PIECE))):
            pieces.append(piece)
            left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _create(target: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_UNFINISHED, dir=target.parent)
    os.close(handle)
    return Path(name)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _sync(path: Path) -> None:
    """Also of a folder: then names in it survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(temporary: Path, target: Path) -> None:
    os.replace(temporary, target)


def _remove(path: Path) -> None:
    path.unlink()


def _make_folder(path: Path) -> None:
    path.mkdir(exist_ok=True)


def _remove_folder(path: Path) -> None:
    path.rmdir()
