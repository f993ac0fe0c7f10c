"""The one reader of JSON and of configuration: values of the kind that is expected, or one line that names the place.

A kind is a type that msgspec understands: dict, list[int], a dataclass, a TypedDict, with bounds by `Annotated`.
Numbers that are not finite, halves of characters, nesting without end and files without end are errors.
"""

import os.path
from pathlib import Path
from typing import Annotated, Any

import msgspec

from blockpilot.core.errors import InputError
from blockpilot.core.files import MAX_BYTES, read_bytes

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def decode_json(data: bytes | str, kind: Any, where: str, advice: str = "") -> Any:
    """The value that a text holds; `where` names it in the error, `advice` tells what to do."""
    try:
        raw = data.encode("utf-8") if isinstance(data, str) else data.removeprefix(_BYTE_ORDER_MARK)
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_place(error)}{_end(advice)}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({_reason(error)}){_end(advice)}") from error


def read_json(path: Path, kind: Any = dict[str, Any], advice: str = "", *, most: int = MAX_BYTES) -> Any:
    """The value in a JSON file; None where there is no file. `advice` tells what to do about a damaged one."""
    return decode_json(read_bytes(path, most), kind, str(path), advice) if os.path.isfile(path) else None


def convert(value: Any, kind: Any, where: str, advice: str = "") -> Any:
    """A value that was read elsewhere, as a value of that kind."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"{where}: {_place(error)}{_end(advice)}") from error


def _place(error: Exception) -> str:
    """`Expected int, got str, at steps[2].size`"""
    what, _, place = str(error).partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    return what.replace("`", "") + (f", at {place}" if place else "")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 text from byte {error.start} on"
    return str(error).replace("Input data was truncated", "cut off, or a character that is only half there")


def _end(advice: str) -> str:
    return f"; {advice}" if advice else ""
