"""Values of the expected kind, or one line that names the place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest

from blockpilot.core.errors import InputError
from blockpilot.core.reading import Count, Positive, convert, decode_json, read_json


class Step(TypedDict):
    size: Count


@dataclass(frozen=True)
class Run:
    name: str
    steps: list[Step]


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ('{"size": "4"}', Step, "here: Expected int, got str, at size"),
        ('{"name": "a", "steps": [{"size": 1}, {"size": -1}]}', Run, "here: Expected int >= 0, at steps[1].size"),
        ('{"name": "a", "steps": [{}]}', Run, "here: Object missing required field size, at steps[0]"),
        ('{"name": null, "steps": []}', Run, "here: Expected str, got null, at name"),
        ("[1, 2.5]", list[int], "here: Expected int, got float, at [1]"),
        ("[]", dict[str, Any], "here: Expected object, got array"),
        ("0", Positive, "here: Expected int >= 1"),
    ],
)
def test_an_error_names_the_place(text: str, kind: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_json(text, kind, "here")
    assert str(caught.value) == line
    with pytest.raises(InputError, match=r"; fetch it again$"):
        decode_json(text, kind, "here", "fetch it again")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b'{"a": 1', "cut off"),
        (b"{'a': 1}", "malformed"),
        (b"[NaN]", "invalid character"),
        (b"[Infinity]", "invalid character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'["\\ud800"]', "half there"),
        (b'["\\udc00\\ud800"]', "half there|surrogate"),
        (b'["\xff"]', "no UTF-8 text from byte|invalid utf-8"),
        (b"[1] [2]", "trailing characters"),
        (b"\x00" * 8, "invalid character|malformed"),
    ],
)
def test_what_is_no_json_is_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=rf"^here: not valid JSON \(.*({reason})") as caught:
        decode_json(data, Any, "here")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_halves_of_characters_in_a_text_are_no_json() -> None:
    with pytest.raises(InputError, match="here: not valid JSON"):
        decode_json('["\ud800"]', Any, "here")


def test_numbers_without_end_are_refused() -> None:
    with pytest.raises(InputError, match=r"^here: Number out of range, at \[0\]$"):
        decode_json("[1e999]", Any, "here")
    with pytest.raises(InputError, match=r"Expected int <= 9007199254740992, at size|out of range"):
        decode_json('{"size": 1' + "0" * 30 + "}", Step, "here")
    with pytest.raises(InputError, match="here"):
        decode_json('{"size": 1' + "0" * 10_000 + "}", Step, "here")


def test_a_mark_of_byte_order_is_no_content() -> None:
    assert decode_json(b'\xef\xbb\xbf{"size": 3}', Step, "here") == {"size": 3}


def test_values_read_elsewhere_are_judged_alike() -> None:
    assert convert({"name": "a", "steps": [{"size": 1}]}, Run, "here") == Run("a", [{"size": 1}])
    with pytest.raises(InputError, match=r"^here: Expected int, got str, at size; look$"):
        convert({"size": "1"}, Step, "here", "look")


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) is None and read_json(tmp_path) is None
    path.write_text('{"size": 3}')
    assert read_json(path, Step) == {"size": 3}
    with pytest.raises(InputError, match=r"config\.json is larger than"):
        read_json(path, most=4)
    path.write_text("{")
    with pytest.raises(InputError, match=rf"^{path}: not valid JSON \(cut off.*\); mend it$"):
        read_json(path, advice="mend it")
