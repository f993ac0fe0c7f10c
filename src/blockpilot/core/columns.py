"""Columns of numbers, as our own safetensors files hold them: what is said of them is judged before they are read.

A header of a few bytes can promise more than any memory holds. So the reader of a file first sees names, kinds and
shapes, and refuses what it does not want; then the numbers are read, as many as were promised and no more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockpilot.core.compressed import open_unpacked, read_some
from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE
from blockpilot.core.reading import Count, convert, decode_json

Columns = dict[str, NDArray[Any]]
_MAX_HEADER = 64 * MEGABYTE
_CHUNK = 16 * MEGABYTE
_METADATA = "__metadata__"
_KINDS = {
    "F16": "f2",
    "F32": "f4",
    "F64": "f8",
    "U8": "u1",
    "U16": "u2",
    "I8": "i1",
    "I16": "i2",
    "I32": "i4",
    "I64": "i8",
}


class _Entry(TypedDict):
    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class Promise:
    """What a header says of one column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "f"


Check = Callable[[dict[str, Promise], dict[str, str]], None]  # columns and metadata; raises ValueError


def read_columns(path: Path, check: Check, *, most: int, advice: str) -> tuple[Columns, dict[str, str]]:
    """The columns of a file and its metadata. What `check` raises as ValueError tells what is wrong."""
    with open_unpacked(path) as file:
        try:
            header, metadata = _read_header(path, file)
            entries = {name: _read_entry(name, value) for name, value in header.items()}
            check({name: promise for name, (promise, _) in entries.items()}, metadata)
            end = max((place for _, (_, place) in entries.values()), default=0)
            if end > most:
                raise ValueError(f"it holds more than {most / MEGABYTE:.0f} MB")
            data = _read_data(path, file, end)
        except (ValueError, InputError) as error:
            said = str(error).removeprefix(f"{path} ")
            raise InputError(f"{path} is damaged: {said}; {advice}") from error
    return {name: _view(data, *entry) for name, entry in entries.items()}, metadata


def _read_header(path: Path, file: BufferedIOBase) -> tuple[dict[str, Any], dict[str, str]]:
    """What is said of the columns, and the metadata."""
    size = int.from_bytes(read_some(path, file, 8), "little")
    if not 2 <= size <= _MAX_HEADER:
        raise ValueError("it has no header")
    header: dict[str, Any] = decode_json(read_some(path, file, size), dict[str, Any], "its header")
    metadata: dict[str, str] = convert(header.pop(_METADATA, {}), dict[str, str], "its metadata")
    return header, metadata


def _read_entry(name: str, value: Any) -> tuple[Promise, tuple[int, int]]:
    entry: _Entry = convert(value, _Entry, f"its column {name!r:.80}")
    if (kind := _KINDS.get(entry["dtype"])) is None:
        raise ValueError(f"its column {name!r:.80} holds numbers of the unknown kind {entry['dtype']!r:.20}")
    promise, (start, end) = Promise(np.dtype(f"<{kind}"), tuple(entry["shape"])), entry["data_offsets"]
    if end - start != math.prod(promise.shape) * promise.dtype.itemsize:
        raise ValueError(f"its column {name!r:.80} has another length than it should")
    return promise, (start, end)


def _read_data(path: Path, file: BufferedIOBase, size: int) -> bytearray:
    data = bytearray()
    while part := read_some(path, file, min(size - len(data), _CHUNK)):
        data += part
    if len(data) < size or read_some(path, file, 1):
        raise ValueError("its length is not what its header says")
    return data


def _view(data: bytearray, promise: Promise, place: tuple[int, int]) -> NDArray[Any]:
    if 0 in promise.shape:
        return np.zeros(promise.shape, promise.dtype)
    found = np.frombuffer(data, promise.dtype, math.prod(promise.shape), place[0])
    return np.require(found.reshape(promise.shape), requirements="A")
