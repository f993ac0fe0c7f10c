"""Files whose checksum was found right are remembered, so that a file that has not changed is not read at every start.

A file counts as unchanged while its size, its times, and its place on the disk are the same. A cache folder that cannot
be written costs time and never the answer.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from blockpilot.core.config import cache_dir
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import MEGABYTE, hash_file, write_bytes
from blockpilot.core.reading import read_json

logger = logging.getLogger(__name__)
LIST = "checksums.json"  # of a folder: name -> SHA-256
_MEMORY = "verified.json"  # in the cache folder
_SETTLED_NS = 2 * 10**9  # clocks of file systems are coarse: a file this young may change and look the same

_Mark = tuple[int, int, int, int]  # size, time of the content, time of the entry, inode
_Memory = dict[str, tuple[_Mark, str]]


def is_verified(path: Path, sha256: str) -> bool:
    """Whether a file has this checksum: computed again only if the file has changed since that was last found."""
    before, key = _mark(path), str(path.absolute())
    if _recall().get(key) == (before, sha256):
        return True
    if hash_file(path) != sha256:
        return False
    if before == _mark(path) and time.time_ns() - max(before[1:3]) > _SETTLED_NS:
        _remember(key, before, sha256)
    return True


def write_list(folder: Path) -> None:
    """Note the checksums of a folder's files beside them."""
    found = {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != LIST}
    write_bytes(folder / LIST, msgspec.json.encode(found))


def is_intact(folder: Path) -> bool:
    """Whether a folder has the files of its list, and all of them are as they were written."""
    try:
        found: dict[str, str] = read_json(folder / LIST, dict[str, str], most=MEGABYTE) or {}
        return bool(found) and all(is_verified(folder / Path(name).name, sha256) for name, sha256 in found.items())
    except (InputError, OSError) as error:
        logger.debug("%s: %s", folder, error)
        return False


def _mark(path: Path) -> _Mark:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _recall() -> _Memory:
    try:
        return read_json(cache_dir() / _MEMORY, _Memory, most=MEGABYTE) or {}
    except InputError as error:
        logger.debug("what was verified is forgotten: %s", error)
        return {}


def _remember(key: str, mark: _Mark, sha256: str) -> None:
    """Files that are gone are forgotten; of two processes that write at once one is."""
    known = {path: row for path, row in _recall().items() if os.path.exists(path)}
    try:
        write_bytes(cache_dir() / _MEMORY, msgspec.json.encode(known | {key: (mark, sha256)}))
    except BlockPilotError as error:
        logger.debug("what was verified is not remembered: %s", error)
