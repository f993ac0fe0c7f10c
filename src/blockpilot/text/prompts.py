"""Prompt files: .txt (one prompt per line) and .jsonl, plain or compressed with gzip or xz.

A JSON line holds its prompt under `turns` (the first user turn), `prompt`, `text` or `question`. Evaluation sets split
by rule, not by list: prompts whose sha256(id) is 0 modulo 4 are calibration, the rest are test.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blockpilot.core.errors import InputError

_KEYS = ("prompt", "text", "question", "instruction")


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str

    @property
    def is_calibration(self) -> bool:
        return int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % 4 == 0


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file; an error names the file and the line."""
    try:
        with _open(path) as lines:
            prompts = list(_parse(path, lines))
    except FileNotFoundError as error:
        raise InputError(f"prompt file {path} does not exist") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"prompt file {path} cannot be read: {reason}") from error
    if not prompts:
        raise InputError(f"prompt file {path} is empty")
    return prompts


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")


def _parse(path: Path, lines: IO[bytes]) -> Iterator[Prompt]:
    is_json = ".jsonl" in path.name
    for number, raw in enumerate(lines, start=1):
        where, name = f"{path}, line {number}", f"{path.name}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        if line:
            yield _parse_json(line, where, name) if is_json else Prompt(name, line)


def _parse_json(line: str, where: str, default_id: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    text = _find_text(record) if isinstance(record, dict) else None
    if not text:
        raise InputError(f"{where}: no prompt found; expected a text under turns, {', '.join(_KEYS)}")
    return Prompt(str(record.get("id", default_id)), text)


def _find_text(record: dict[str, Any]) -> str | None:
    turns = record.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        return turns[0]
    return next((record[key] for key in _KEYS if isinstance(record.get(key), str) and record[key].strip()), None)
