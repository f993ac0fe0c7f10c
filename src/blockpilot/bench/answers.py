"""Raw records: one line per answer, written through to the disk as soon as it exists.

Everything else is computed from them. A run that is cut off loses the round it was in: a round is one batch of prompts
answered by every method, and is measured anew as a whole, so that all its times come from the same minutes.
"""

import json
import os.path
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from blockpilot.core.compressed import read_lines
from blockpilot.core.errors import InputError
from blockpilot.core.files import append_text, read_bytes, write_text
from blockpilot.core.reading import Count, convert, decode_json

RoundKey = tuple[str, int, int]  # task, batch, repeat
StepSize = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_MAX_BYTES = 2**34  # of all answers
_ADVICE = "mend the line or choose another --out"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of one prompt, by one method. Seconds of a batch are those of all its requests together."""

    task: str
    prompt_id: str
    batch: Count  # which prompts of the task ran together; with concurrency 1 the prompt's own number
    turn: Count
    repeat: Count
    method: str
    token_ids: Annotated[list[Count], msgspec.Meta(min_length=1)]
    text: str
    num_prompt_tokens: Count
    finish_reason: str
    block_sizes: list[StepSize]
    verify_sizes: list[StepSize]
    emitted: list[StepSize]
    prefill_seconds: Seconds
    decode_seconds: Seconds
    draft_seconds: Seconds
    verify_seconds: Seconds
    pilot_seconds: Seconds
    peak_memory_bytes: Count

    @property
    def round_key(self) -> RoundKey:
        return self.task, self.batch, self.repeat

    @property
    def tau(self) -> float | None:
        return sum(self.emitted) / len(self.emitted) if self.emitted else None


class AnswersFile:
    """The answers of a run, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = _read(path)

    def drop_incomplete(self, num_answers: dict[RoundKey, int]) -> None:
        """Forget rounds that have fewer answers than they should; they are measured anew."""
        found = Counter(answer.round_key for answer in self.answers)
        kept = [answer for answer in self.answers if found[answer.round_key] == num_answers.get(answer.round_key)]
        text = "".join(_line(answer) for answer in kept)
        if not os.path.isfile(self.path) or read_bytes(self.path, _MAX_BYTES) != text.encode():
            write_text(self.path, text)
        else:
            append_text(self.path, "")  # a run that failed may not have synced what it wrote
        self.answers = kept

    def append(self, answers: Sequence[Answer]) -> None:
        append_text(self.path, "".join(_line(answer) for answer in answers))
        self.answers += answers


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def _read(path: Path) -> list[Answer]:
    """Every whole line. A last line without its end was cut off; anything else that is no answer is an error."""
    if not os.path.exists(path):
        return []
    if not os.path.isfile(path):
        raise InputError(f"{path} is no file: {_ADVICE}")
    answers = []
    for number, line in enumerate(read_lines(path, most=_MAX_BYTES), start=1):
        if line.endswith(b"\n"):  # what follows the last line end was cut off
            answers.append(_read_answer(line, f"{path}, line {number}"))
    return answers


def _read_answer(line: bytes, where: str) -> Answer:
    values = decode_json(line, dict[str, Any], where, _ADVICE)
    if values.keys() != Answer.__dataclass_fields__.keys():
        raise InputError(f"{where}: not an answer of this version; choose another --out")
    answer: Answer = convert(values, Answer, where, _ADVICE)
    if len({len(answer.block_sizes), len(answer.verify_sizes), len(answer.emitted)}) > 1:
        raise InputError(f"{where}: its steps have different lengths; {_ADVICE}")
    return answer


def plain_answers(answers: Iterable[Answer]) -> list[Answer]:
    """Those that others are compared with: of plain decoding, in the first repeat."""
    return [answer for answer in answers if answer.method == "ar" and answer.repeat == 0]


def select(answers: Iterable[Answer], *, task: str | None = None, method: str | None = None) -> list[Answer]:
    return [a for a in answers if task in (None, a.task) and method in (None, a.method)]
