"""GGUF files as they lie on the disk: a header of named values, a table of tensors, and the tensors' data.

Nobody vouches for a file that was downloaded. Every count, length and offset in it is compared with what is left of the
file, and with a bound of our own, before anything is made of it. So a damaged file costs a moment and one line.
What the values mean is the business of `gguf.py`.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, reason_of

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_KEY, _ALIGNMENT, MAX_ALIGNMENT = "general.alignment", 32, 1 << 16
MAX_HEADER_BYTES = 64 * MEGABYTE  # the largest vocabularies take about 20
MAX_FIELDS, MAX_TENSORS, MAX_DIMENSIONS = 1 << 14, 1 << 15, 4
MAX_TEXTS, MAX_NUMBERS = 1 << 20, 1 << 21  # of all arrays together
MAX_NAME_BYTES = 256
_FIELD_BYTES, _TENSOR_BYTES = 13, 32  # the least that one takes


@dataclass(frozen=True, eq=False)
class GgufTensor:
    name: str
    kind: str  # how numbers are stored: F32, Q8_0, ...
    shape: tuple[int, ...]  # as the file says it: the other way round than PyTorch
    data: NDArray[Any]  # in PyTorch's order; rows of bytes where numbers lie in blocks


@dataclass(frozen=True, eq=False)
class GgufFile:
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Values and tensors of a file; the tensors' data stays on the disk until it is looked at."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != _MAGIC:
            raise InputError(f"{path} is not a GGUF file (it starts with {magic!r})")
        content: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    header = _Header(content, str(path))
    num_tensors, num_fields = header.read_counts()
    fields = header.read_fields(num_fields)
    entries = [header.read_tensor() for _ in range(num_tensors)]
    return GgufFile(fields, _place_tensors(content, header, entries, fields.get(_ALIGNMENT_KEY, _ALIGNMENT)))


@dataclass(frozen=True)
class _Entry:
    """What the table says of a tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        count = self.row_bytes
        for size in self.shape[1:]:
            count *= size
        return count


class _Header:
    """Reads from front to back and never beyond the end."""

    def __init__(self, content: NDArray[np.uint8], where: str) -> None:
        self.where, self.place = where, len(_MAGIC)
        self._content, self._bytes = content, memoryview(content)  # type: ignore[arg-type]
        self._size, self._end = len(content), min(len(content), MAX_HEADER_BYTES)
        self._num_texts = self._num_numbers = 0

    def fail(self, what: str) -> InputError:
        return InputError(f"{self.where} is damaged: {what}; fetch it again")

    def read_counts(self) -> tuple[int, int]:
        version = self._integer(4)
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is in big-endian order" if is_swapped else f"has version {version}"
            raise InputError(f"{self.where} {what}, which is not supported; known: 2 and 3, little-endian")
        num_tensors, num_fields = self._integer(8), self._integer(8)
        self._check_count("tensors", num_tensors, MAX_TENSORS, _TENSOR_BYTES)
        self._check_count("fields", num_fields, MAX_FIELDS, _FIELD_BYTES)
        return num_tensors, num_fields

    def read_fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(count):
            name = self._name("the name of a field")
            if name in fields:
                raise self.fail(f"field {name} is there twice")
            fields[name] = self._value(name)
        return fields

    def read_tensor(self) -> _Entry:
        name = self._name("the name of a tensor")
        num_dimensions = self._integer(4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {name} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._integer(8) for _ in range(num_dimensions))
        kind, row_bytes = self._storage(name, self._integer(4), shape[0])
        offset = self._integer(8)
        if min(shape) < 1:
            raise self.fail(f"tensor {name} has shape {list(shape)}")
        return _Entry(name, kind, shape, offset, row_bytes)

    def _storage(self, name: str, number: int, row: int) -> tuple[str, int]:
        """The kind that a number stands for, and the bytes of a row."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
            block, num_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise InputError(f"{self.where}: tensor {name} has type {number}, which is not known") from error
        if row % block:
            raise self.fail(f"rows of tensor {name} have {row} numbers, no multiple of the {block} of {kind.name}")
        return kind.name, row // block * num_bytes

    def _value(self, name: str) -> Any:
        kind = self._integer(4)
        if kind == _STRING:
            return self._text(name)
        if kind != _ARRAY:
            return self._many(name, kind, 1)[0]
        kind, count = self._integer(4), self._integer(8)
        if kind == _STRING:
            self._num_texts += count
            self._check_items(name, count, self._num_texts, MAX_TEXTS)
            return self._texts(name, count)
        self._num_numbers += count
        self._check_items(name, count, self._num_numbers, MAX_NUMBERS)
        return self._many(name, kind, count)

    def _check_items(self, name: str, count: int, so_far: int, most: int) -> None:
        if so_far > most:
            raise self.fail(f"field {name} holds {count} values, and all such arrays may hold {most}")

    def _many(self, name: str, kind: int, count: int) -> list[Any]:
        if kind == _BOOL:
            return (self._numbers("u1", count) != 0).tolist()
        if kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"of type {kind}"
            raise InputError(f"{self.where}: field {name} is {what}, which is not supported")
        return self._numbers(_NUMBERS[kind], count).tolist()

    def _integer(self, size: int) -> int:
        start = self.place
        self._require(size)
        self.place += size
        return int.from_bytes(self._bytes[start : self.place], "little")

    def _numbers(self, kind: str, count: int) -> NDArray[Any]:
        start, size = self.place, np.dtype(kind).itemsize * count
        self._require(size)
        self.place += size
        return self._content[start : self.place].view(kind)

    def _name(self, what: str) -> str:
        """What errors may show."""
        name = self._text(what, MAX_NAME_BYTES)
        if not name.isprintable():
            raise self.fail(f"{what} is {name!r}")
        return name

    def _text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self._integer(8)
        if length > most:
            raise self.fail(f"{what} has {length} bytes, and may have {most}")
        self._require(length)
        return self._decode(what, length)

    def _texts(self, name: str, count: int) -> list[str]:
        """A loop without calls: vocabularies have hundreds of thousands."""
        self._require(_LENGTH.size * count)
        content, read = self._bytes, _LENGTH.unpack_from
        found: list[str] = []
        place, last = self.place, self._end - _LENGTH.size
        try:
            while len(found) < count and place <= last:
                start = place + 8
                place = start + read(content, place)[0]
                if place > self._end:
                    break
                found.append(str(content[start:place], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.fail(f"{name} is not UTF-8 text") from error
        self._require(place - self.place + (0 if len(found) == count else _LENGTH.size))
        self.place = place
        return found

    def _decode(self, what: str, length: int) -> str:
        start = self.place
        self.place += length
        try:
            return str(self._bytes[start : self.place], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 text") from error

    def _check_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        if count > most:
            raise self.fail(f"it names {count} {what}, and may have {most}")
        self._require(count * least_bytes)

    def _require(self, count: int) -> None:
        """Whether the header goes on for that many bytes."""
        if self.place + count > self._size:
            need = f"{self._size} bytes, its header needs at least {self.place + count}"
            raise InputError(f"{self.where} is truncated: {need}; fetch it again")
        if self.place + count > self._end:
            raise self.fail(f"its header has more than {MAX_HEADER_BYTES // MEGABYTE} MB")


def _place_tensors(
    content: NDArray[np.uint8], header: _Header, entries: list[_Entry], alignment: Any
) -> dict[str, GgufTensor]:
    """Views into the file, once all of them are known to lie in it and apart."""
    is_power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or not 8 <= alignment <= MAX_ALIGNMENT:
        raise header.fail(f"{_ALIGNMENT_KEY} {alignment!r} is no power of two from 8 to {MAX_ALIGNMENT}")
    begin, end = -(-header.place // alignment) * alignment, 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % alignment:
            raise header.fail(f"tensor {entry.name} lies at {entry.offset}, no multiple of {alignment}")
        if entry.offset < end:
            raise header.fail(f"tensor {entry.name} lies inside of another one")
        end = entry.offset + entry.num_bytes
    if begin + end > len(content):
        need = f"{len(content)} bytes, its tensors need {begin + end}"
        raise InputError(f"{header.where} is truncated: {need}; fetch it again")
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise header.fail(f"tensor {entry.name} is there twice")
        tensors[entry.name] = _view(content, begin, entry)
    return tensors


def _view(content: NDArray[np.uint8], begin: int, entry: _Entry) -> GgufTensor:
    start, kind = begin + entry.offset, _PLAIN.get(entry.kind, "u1")
    numbers = content[start : start + entry.num_bytes].view(kind)
    row = entry.row_bytes // numbers.itemsize
    return GgufTensor(entry.name, entry.kind, entry.shape, numbers.reshape(*entry.shape[:0:-1], row))
