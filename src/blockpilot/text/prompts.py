"""Prompt files: .txt (one prompt per line) and .jsonl, plain or compressed with gzip or xz.

A JSON line holds its prompt under `turns` (user turns in order), `prompt`, `text` or `question`, and may hold what
scoring needs under `answer` and `meta`. Evaluation sets split by rule, not by list: prompts whose sha256(id) is 0
modulo 4 are calibration, the rest are test.
"""

import hashlib
import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockpilot.core.compressed import read_lines
from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE
from blockpilot.core.reading import decode_json

SPLITS = ("test", "calibration", "all")
MAX_BYTES = 256 * MEGABYTE  # of a file, once it is unpacked
MAX_LINES = 1 << 20
_KEYS = ("prompt", "text", "question", "instruction")


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str  # the first user turn
    later_turns: tuple[str, ...] = ()
    answer: str | None = None  # the right result, where there is one
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def turns(self) -> tuple[str, ...]:
        return (self.text, *self.later_turns)

    @property
    def is_calibration(self) -> bool:
        return int(self.digest, 16) % 4 == 0

    def is_in(self, split: str) -> bool:
        return split == "all" or self.is_calibration == (split == "calibration")

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.id.encode()).hexdigest()


def read_prompts(path: Path, *, skip_bad: Callable[[InputError], None] | None = None) -> list[Prompt]:
    """Every prompt of a file; an error names the file and the line.

    `skip_bad`, if given, is called with the error of a bad line, which is then left out.
    """
    if not os.path.exists(path):  # it may be a pipe
        raise InputError(f"prompt file {path} does not exist")
    try:
        prompts = list(_parse(path, read_lines(path, most=MAX_BYTES), skip_bad))
    except InputError as error:
        raise InputError(f"prompt file {error}") from error
    if not prompts:
        raise InputError(f"prompt file {path} is empty")
    return prompts


def _parse(path: Path, lines: Iterable[bytes], skip_bad: Callable[[InputError], None] | None) -> Iterator[Prompt]:
    for number, raw in enumerate(lines, start=1):
        if number > MAX_LINES:
            raise InputError(f"{path} has more than {MAX_LINES:,} lines: split it into several files")
        try:
            prompt = _parse_line(path, number, raw)
        except InputError as error:
            if skip_bad is None:
                raise
            skip_bad(error)
            continue
        if prompt is not None:
            yield prompt


def _parse_line(path: Path, number: int, raw: bytes) -> Prompt | None:
    """The prompt in one line; None where it is blank."""
    where, name = f"{path}, line {number}", f"{path.name}:{number}"
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not line:
        return None
    return _parse_json(line, where, name) if ".jsonl" in path.name else Prompt(name, line)


def _parse_json(line: str, where: str, default_id: str) -> Prompt:
    record = decode_json(line, Any, where)
    turns = _find_turns(record) if isinstance(record, dict) else ()
    if not turns:
        raise InputError(f"{where}: no prompt found; expected a text under turns, {', '.join(_KEYS)}")
    id_, answer, meta = record.get("id"), record.get("answer"), record.get("meta")
    if isinstance(id_, list | dict):
        raise InputError(f"{where}: an id is a text or a number")
    return Prompt(
        id=default_id if id_ is None else str(id_),
        text=turns[0],
        later_turns=turns[1:],
        answer=None if answer is None else str(answer),
        meta=meta if isinstance(meta, dict) else {},
    )


def _find_turns(record: dict[str, Any]) -> tuple[str, ...]:
    turns = record.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
        return tuple(turns)
    text = next((record[key] for key in _KEYS if isinstance(record.get(key), str) and record[key].strip()), None)
    return (text,) if text else ()
