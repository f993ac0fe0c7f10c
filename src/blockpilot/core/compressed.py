"""Files that may be compressed, by their name with gzip (.gz) or xz (.xz): read up to a limit of what comes out.

A few bytes can unpack to more than any memory holds, so nothing here unpacks a file without a bound.
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, announce_read, reason_of

LONGEST_LINE = 16 * MEGABYTE
_CHUNK = MEGABYTE  # a read takes as much memory as it may bring
_MOST_IDLE = 2 * MEGABYTE  # of a packed file, beyond what comes out of it: headers, and what is read ahead
_MOST_EMPTY = MEGABYTE // 4  # bytes of nothing in a row
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_BROKEN = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)  # ValueError: a name that no file can have


def read_unpacked(path: Path, most: int) -> bytes:
    """All that a file holds. More than `most` is refused before it fills the memory."""
    data = bytearray()
    with open_unpacked(path) as file:
        while part := read_some(path, file, min(most + 1 - len(data), _CHUNK)):
            data += part
    if len(data) > most:
        raise _too_large(path, most)
    return bytes(data)


def read_lines(path: Path, *, most: int, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Line by line, with their ends. A line beyond `longest` and a file beyond `most` bytes are refused."""
    left, number = most, 0
    with open_unpacked(path) as file:
        while line := _read(path, file.readline, min(longest, left) + 1):
            left, number = left - len(line), number + 1
            if len(line) > longest:
                limit = f"longer than {longest / MEGABYTE:.0f} MB, the most that a line may have"
                raise InputError(f"{path}, line {number}: {limit}; split the file into shorter lines")
            if left < 0:
                raise _too_large(path, most)
            yield line


def open_unpacked(path: Path) -> io.BufferedIOBase:
    """The file as a stream of what it holds; give every read of it a limit."""
    try:
        announce_read(path)
        opener = _OPENERS.get(path.suffix)
        return io.BufferedReader(io.FileIO(path)) if opener is None else _Unpacked(path, opener)
    except _BROKEN as error:
        raise _unreadable(path, error) from error


class _Unpacked(io.BufferedIOBase):
    """What a packed file holds. Padding and empty parts bring nothing and take time: a few are read, then no more."""

    def __init__(self, path: Path, opener: Callable[..., Any]) -> None:
        self._packed = _Packed(path)
        self._file = opener(self._packed, "rb")
        self._num_out = 0

    def read(self, count: int | None = -1, /) -> bytes:
        return self._take(self._file.read, count)

    def readline(self, count: int | None = -1, /) -> bytes:
        return self._take(self._file.readline, count)

    def close(self) -> None:
        self._file.close()
        self._packed.close()
        super().close()

    def _take(self, read: Callable[[int], bytes], count: int | None) -> bytes:
        assert count is not None and count >= 0, "every read has a limit"
        self._packed.most = self._num_out + count + _MOST_IDLE
        data = read(count)
        self._num_out += len(data)
        return data


class _Packed(io.FileIO):
    """A packed file that is read up to a limit."""

    most, num_in, num_empty = 0, 0, 0

    def read(self, count: int | None = -1, /) -> bytes:
        data: bytes = super().read(count) or b""
        self.num_in += len(data)
        self.num_empty = self.num_empty + len(data) if not data.strip(b"\0") else 0  # gzip skips them byte by byte
        if self.num_in > self.most or self.num_empty > _MOST_EMPTY:
            raise OSError("it is padded, or cut into parts that hold nothing; pack it again")
        return data


def read_some(path: Path, file: io.BufferedIOBase, count: int) -> bytes:
    """Up to `count` bytes of a stream; it takes as much memory as `count` says, so keep it small."""
    return _read(path, file.read, count)


def _read(path: Path, read: Callable[[int], bytes], most: int) -> bytes:
    try:
        return read(most)
    except _BROKEN as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read: {reason_of(error)}")


def _too_large(path: Path, most: int) -> InputError:
    limit = f"more than {most / MEGABYTE:.0f} MB, the most that such a file may have"
    return InputError(f"{path} holds {limit}; split it into several files")
