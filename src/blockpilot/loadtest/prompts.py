"""What is asked: prompt sets of `bench`, files of prompts, files of conversations; in a seeded order.

The order goes on from one load to the next and begins again when all prompts were asked: a server that keeps the
beginnings of prompts must not meet the same ones in every load.
"""

import os.path
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from blockpilot.bench.tasks import NOT_SHIPPED, TASKS, read_file, read_task
from blockpilot.core.compressed import read_lines
from blockpilot.core.errors import InputError
from blockpilot.core.reading import decode_json
from blockpilot.text.prompts import MAX_BYTES, MAX_LINES

DEFAULT = "gsm8k,humaneval,mt_bench"
_MOST_SOURCES = 64


@dataclass(frozen=True)
class Prompt:
    id: str
    messages: tuple[dict[str, Any], ...]


class _Conversation(msgspec.Struct):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    id: str | int | None = None


def read_sources(text: str) -> list[Prompt]:
    """All prompts of some tasks and files, named with commas between them."""
    names = [text] if os.path.isfile(text) else [name.strip() for name in text.split(",")]
    if not all(names) or len(names) > _MOST_SOURCES:
        raise InputError(f"--prompts {text[:80]!r}: give tasks or files, separated by commas")
    return [prompt for name in dict.fromkeys(names) for prompt in _read_source(name)]


def _read_source(name: str) -> list[Prompt]:
    """Of a task its test split, of a file all; of prompts with several turns the first one."""
    path = Path(name)
    if name in NOT_SHIPPED:
        raise InputError(f"--prompts: task {name} does not ship because of its licence: name its file")
    if name not in TASKS and not os.path.exists(path):
        raise InputError(f"--prompts: {name[:200]!r} is no file and none of the tasks {', '.join(_shipped())}")
    if name not in TASKS and _holds_conversations(path):
        return list(_read_conversations(path))
    task = read_task(name, data=None, split="test") if name in TASKS else read_file(path, split="all")
    return [Prompt(f"{task.name}/{one.id}", ({"role": "user", "content": one.text},)) for one in task.prompts]


def _shipped() -> list[str]:
    return [name for name in TASKS if name not in NOT_SHIPPED]


def _holds_conversations(path: Path) -> bool:
    """By the first line; a pipe can be read only once, so it holds prompts."""
    if ".jsonl" not in path.name or not os.path.isfile(path):
        return False
    first = next((line for line in read_lines(path, most=MAX_BYTES) if line.strip()), b"")
    try:
        return "messages" in decode_json(first, dict[str, Any], str(path))
    except InputError:
        return False  # the reader of prompts says what is wrong


def _read_conversations(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(read_lines(path, most=MAX_BYTES), start=1):
        if number > MAX_LINES:
            raise InputError(f"{path} has more than {MAX_LINES:,} lines: split it into several files")
        if line.strip():
            one = decode_json(line, _Conversation, f"prompt file {path}, line {number}")
            yield Prompt(f"{path.name}:{number}" if one.id is None else str(one.id), tuple(one.messages))


def require_texts(prompts: Sequence[Prompt]) -> None:
    """For the endpoint that takes no conversations."""
    for prompt in prompts:
        if len(prompt.messages) != 1 or not isinstance(prompt.messages[0].get("content"), str):
            raise InputError(f"--endpoint completions takes texts, and prompt {prompt.id[:80]!r} is a conversation")


def draw(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """Without an end: all of them in a seeded order, and again."""
    order = random.Random(seed).sample(list(prompts), len(prompts))
    while True:
        yield from order


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the first request to each one: a Poisson process, the same for all rates but for its scale."""
    source, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now / rate)
        now += source.expovariate(1.0)
    return times
