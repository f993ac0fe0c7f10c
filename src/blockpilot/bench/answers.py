"""Raw records: one line per answer, written through to the disk as soon as it exists.

Everything else is computed from them. A run that is cut off loses the round it was in: a round is one batch of prompts
answered by every method, and is measured anew as a whole, so that all its times come from the same minutes.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockpilot.core.errors import InputError
from blockpilot.core.files import ensure_folder, parse_json, write_text

RoundKey = tuple[str, int, int]  # task, batch, repeat


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of one prompt, by one method. Seconds of a batch are those of all its requests together."""

    task: str
    prompt_id: str
    batch: int  # which prompts of the task ran together; with concurrency 1 the prompt's own number
    turn: int
    repeat: int
    method: str
    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    finish_reason: str
    block_sizes: list[int]
    verify_sizes: list[int]
    emitted: list[int]
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    verify_seconds: float
    pilot_seconds: float
    peak_memory_bytes: int

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
        if not self.path.is_file() or self.path.read_bytes() != text.encode():
            write_text(self.path, text)
        self.answers = kept

    def append(self, answers: Sequence[Answer]) -> None:
        ensure_folder(self.path.parent)
        with self.path.open("a", encoding="utf-8") as file:
            for answer in answers:
                file.write(_line(answer))
                file.flush()
                os.fsync(file.fileno())
        self.answers += answers


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def _read(path: Path) -> list[Answer]:
    """Every whole line. A last line without its end was cut off; anything else that is no answer is an error."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    answers = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # what follows the last line end was cut off
        values = parse_json(line, f"{path}, line {number}", "; mend the line or choose another --out")
        if not isinstance(values, dict) or values.keys() != Answer.__dataclass_fields__.keys():
            raise InputError(f"{path}, line {number}: not an answer of this version; choose another --out")
        answers.append(Answer(**values))
    return answers


def plain_answers(answers: Iterable[Answer]) -> list[Answer]:
    """Those that others are compared with: of plain decoding, in the first repeat."""
    return [answer for answer in answers if answer.method == "ar" and answer.repeat == 0]


def select(answers: Iterable[Answer], *, task: str | None = None, method: str | None = None) -> list[Answer]:
    return [a for a in answers if task in (None, a.task) and method in (None, a.method)]
