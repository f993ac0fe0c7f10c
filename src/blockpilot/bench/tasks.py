"""The prompt sets: small subsets inside the package, whole ones in a folder, or files of the user's own.

Prompts are taken in the order of the digest of their id. That order is arbitrary but fixed: the first N are a fair
sample of a set sorted by topic, and more prompts only add to fewer.
"""

import os.path
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import hash_file
from blockpilot.text.prompts import Prompt, read_prompts

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "prompts"
_SUFFIXES = (".jsonl.gz", ".jsonl.xz", ".jsonl")
_SkipBad = Callable[[InputError], None]


TASKS = {  # task: name of the whole set's file, without suffix
    "gsm8k": "gsm8k_test",
    "math500": "math500",
    "aime24": "aime24",
    "humaneval": "humaneval",
    "mbpp": "mbpp_sanitized_test",
    "swebench": "swebench_lite_test",
    "mt_bench": "mt_bench",
    "alpaca": "alpaca_1000",
}
NOT_SHIPPED = ("aime24", "alpaca")


@dataclass(frozen=True)
class TaskPrompts:
    name: str
    prompts: tuple[Prompt, ...]  # those to measure, in the order of their digests
    calibration: tuple[Prompt, ...]  # those to choose on
    source: dict[str, Any]  # file name and checksum

    def first_turns(self) -> "TaskPrompts":
        cut = [tuple(replace(prompt, later_turns=()) for prompt in one) for one in (self.prompts, self.calibration)]
        return replace(self, prompts=cut[0], calibration=cut[1])


def default_tasks(data: Path | None) -> tuple[str, ...]:
    """Every set that is at hand."""
    return tuple(
        name for name, file in TASKS.items() if (name not in NOT_SHIPPED if data is None else _find(data, file))
    )


def read_task(name: str, *, data: Path | None, split: str, skip_bad: _SkipBad | None = None) -> TaskPrompts:
    """A known set, from `data` or as it ships."""
    file = TASKS.get(name)
    if file is None:
        raise InputError(f"unknown task {name!r}; known: {', '.join(TASKS)}; your own prompts go in with --prompts")
    if data is None and name in NOT_SHIPPED:
        raise InputError(f"task {name} does not ship because of its licence: give --data DIR with {file}.jsonl")
    path = SHIPPED / f"{name}.jsonl.gz" if data is None else _find(data, file)
    if path is None:
        raise InputError(f"task {name}: {data} holds no {file}{_SUFFIXES[0]} (or .xz, or uncompressed)")
    return read_file(path, name=name, split=split, skip_bad=skip_bad)


def read_file(path: Path, *, name: str | None = None, split: str, skip_bad: _SkipBad | None = None) -> TaskPrompts:
    """The prompts of a file; a file of the user's own is a task named by its stem."""
    name = path.name.split(".")[0] if name is None else name
    prompts = sort_prompts(read_prompts(path, skip_bad=skip_bad))
    id_, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise InputError(f"prompt file {path}: two prompts have the id {id_!r}")
    chosen = [prompt for prompt in prompts if prompt.is_in(split)]
    if not chosen:
        raise InputError(f"prompt file {path} has no {split} prompts (ids decide): use --split all")
    source = {"file": path.name, "sha256": hash_file(path) if os.path.isfile(path) else ""}  # a pipe is read only once
    return TaskPrompts(name, tuple(chosen), tuple(p for p in prompts if p.is_calibration), source)


def sort_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: prompt.digest)


def _find(data: Path, file: str) -> Path | None:
    if not os.path.isdir(data):
        raise InputError(f"--data {data} is no folder")
    return next((path for suffix in _SUFFIXES if os.path.isfile(path := data / f"{file}{suffix}")), None)
