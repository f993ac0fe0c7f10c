"""Bad content out of good content: bytes, JSON values, safetensors and GGUF headers, compressed files.

Every function takes what is good and a source of randomness, so that programs and hypothesis share them.
"""

import gzip
import json
import lzma
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.unit.models.hostile import (
    ODD_VALUES,
    TYPES,
    Field,
    array,
    gguf_bytes,
    number,
    safetensors_bytes,
    string,
    tensor,
)
from tests.unit.report.hostile import change, find_places

Mutation = Callable[[bytes, Random], bytes]
NUMBERS = (-1, 0, 1, 2, 7, 8, 32, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**64 - 1)
ODD_TEXTS = ("", " ", "\x00", "\n", "a\nb", "\u202e", "\ud800", "../..", "/dev/zero", "{{", "x" * 5000, "nan", "1e999")
ODD_JSON = (*ODD_VALUES, 1e308, -0.5, 2**53 + 1, {"": ""}, [[[[]]]], {"id": 1}, ["a"] * 1000, "\u202e", "a\nb")
_WORDS = (b"\xff", b"\x00", b"NaN", b"1e999", b"\xed\xa0\x80", b"[" * 3000, b'"\\ud800"', b"\xef\xbb\xbf", b"-1", b"{}")
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "U16", "C64", "X")


def change_bytes(data: bytes, random: Random) -> bytes:
    """Cut, flip, insert, repeat or move some of them; most often near the start, where headers are."""
    place = random.randrange(min(len(data), random.choice((16, 256, 10**9))) + 1)
    end = min(len(data), place + random.choice((1, 2, 4, 8, 64, 1024)))
    ways = (
        lambda: data[:place],
        lambda: data[:place] + data[end:],
        lambda: data[:place] + random.randbytes(end - place) + data[end:],
        lambda: data[:place] + struct.pack("<Q", random.choice(NUMBERS) % 2**64) + data[place + 8 :],
        lambda: data[:place] + struct.pack("<I", random.choice(NUMBERS) % 2**32) + data[place + 4 :],
        lambda: data[:place] + random.choice(_WORDS) + data[place:],
        lambda: data[:place] + data[place:end] * random.choice((2, 100)) + data[end:],
        lambda: data[end:] + data[:end],
        lambda: data + random.randbytes(random.choice((1, 100))),
        lambda: data + data,
        lambda: b"",
    )
    return random.choice(ways)()


def change_value(value: Any, random: Random) -> Any:
    """A JSON value with another one somewhere, without something, or with two places exchanged."""
    places = list(find_places(value))
    if not places:
        return random.choice(ODD_JSON)
    place = random.choice(places)
    way = random.randrange(8)
    if way == 0:
        return change(value, place, place)
    if way == 1:
        return change(value, place, _at(value, random.choice(places)))
    if way == 2 and isinstance(found := _at(value, place), int | float):
        return change(value, place, random.choice((-found, found + 1, found - 1, found * 2, str(found), [found])))
    if way == 3 and isinstance(value, dict):
        return value | {random.choice(ODD_TEXTS): random.choice(ODD_JSON)}
    return change(value, place, random.choice(ODD_JSON))


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def change_json(data: bytes, random: Random) -> bytes:
    """One value, or one of many lines of values."""
    if random.random() < 0.25:
        return change_bytes(data, random)
    lines = data.split(b"\n") if b"\n{" in data.rstrip() and not data.startswith((b"{\n", b"[\n")) else [data]
    place = random.randrange(len(lines))
    value = json.loads(lines[place])
    for _ in range(random.choice((1, 1, 1, 3))):
        value = change_value(value, random)
    lines[place] = json.dumps(value).encode()
    return b"\n".join(lines)


def change_safetensors(data: bytes, random: Random) -> bytes:
    """Its header as a value, the length of the header, or bytes."""
    size = int.from_bytes(data[:8], "little")
    header, rest, way = json.loads(data[8 : 8 + size]), data[8 + size :], random.randrange(6)
    names = [name for name in header if name != "__metadata__"]
    if way == 0 or not names:
        return change_bytes(data, random)
    name = random.choice(names)
    entry = dict(header[name])
    if way == 1:
        entry["dtype"] = random.choice(_DTYPES)
    elif way == 2:
        entry["shape"] = random.choice(([], [0], [1, *entry["shape"]], entry["shape"][::-1], [2**40, 2**40]))
    elif way == 3:
        return safetensors_bytes(json.dumps(header).encode(), None, _spoil_numbers(rest, random))
    elif way == 4:
        header = {random.choice((*names, *ODD_TEXTS)): value for value in header.values()} | header
        del header[name]
    else:
        header = change_value(header, random)
        return safetensors_bytes(json.dumps(header).encode(), None, rest)
    return safetensors_bytes(json.dumps(header | {name: entry} if way < 3 else header).encode(), None, rest)


def _spoil_numbers(data: bytes, random: Random) -> bytes:
    """Numbers that are not finite, negative or huge, in any of the usual widths."""
    word = random.choice((struct.pack("<f", float("nan")), b"\xff" * 8, b"\xff\x7f" * 4, bytes(8), b"\x7f" * 8))
    start = random.randrange(0, len(data) + 1, 8)
    end = random.choice((start + len(word), len(data)))
    return data[:start] + word * ((end - start) // len(word)) + data[start + (end - start) // len(word) * len(word) :]


def odd_field(name: str, random: Random) -> Field:
    """A field of a GGUF file with that name and any value."""
    kind = random.choice(list(TYPES))
    value = random.choice(NUMBERS)
    if kind == "f32":
        return number(name, kind, random.choice((0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"))))
    bits = {"u32": 2**32, "bool": 2, "u64": 2**64, "i32": 2**31}[kind]
    ways = (
        lambda: number(name, kind, value % bits),
        lambda: string(name, random.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")),
        lambda: array(name, TYPES["u32"][0], [struct.pack("<I", value % 2**32)] * random.choice((0, 1, 2, 300))),
        lambda: array(name, 8, [], random.choice(NUMBERS) % 2**64),
    )
    return random.choice(ways)()


def odd_gguf(fields: dict[str, Field], random: Random) -> bytes:
    """A header with one field changed, without one or with one more, and tensors of any shape."""
    name = random.choice((*fields, "general.alignment", "llama.rope.scaling.type", "llama.rope.freq_base", "x"))
    kept = {key: field for key, field in fields.items() if key != name or random.random() < 0.8}
    kept[name] = odd_field(name, random)
    shape = [random.choice(NUMBERS) % 2**64 for _ in range(random.randrange(5))]
    entries = [
        tensor(random.choice(("token_embd.weight", "x")), shape, random.randrange(45), random.choice((0, 32, 8)))
    ]
    return gguf_bytes(list(kept.values()), entries[: random.randrange(2)])


def change_compressed(data: bytes, random: Random) -> bytes:
    """The file, what is in it, or a file that unpacks to far more than it has."""
    pack, unpack = (gzip.compress, gzip.decompress) if data[:2] == b"\x1f\x8b" else (lzma.compress, lzma.decompress)
    ways = (
        lambda: change_bytes(data, random),
        lambda: pack(change_json(unpack(data), random)),
        lambda: pack(bytes(random.choice((1 << 16, 20 << 20)))),
        lambda: data + data[: len(data) // 2],
        lambda: unpack(data),
    )
    return random.choice(ways)()
