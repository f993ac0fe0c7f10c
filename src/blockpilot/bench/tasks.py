"""The prompt sets: small subsets inside the package, whole ones in a folder, or files of the user's own.

Prompts are taken in the order of the digest of their id. That order is arbitrary but fixed: the first N are a fair
sample of a set sorted by topic, and more prompts only add to fewer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import hash_file
from blockpilot.text.prompts import Prompt, read_prompts

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "prompts"
SUFFIXES = (".jsonl.gz", ".jsonl.xz", ".jsonl")
SkipBad = Callable[[InputError], None]


@dataclass(frozen=True)
class Task:
    title: str
    file: str  # name of the whole set's file, without suffix
    is_shipped: bool = True


TASKS = {
    "gsm8k": Task("GSM8K", "gsm8k_test"),
    "math500": Task("MATH-500", "math500"),
    "aime24": Task("AIME24", "aime24", is_shipped=False),
    "humaneval": Task("HumanEval", "humaneval"),
    "mbpp": Task("MBPP", "mbpp_sanitized_test"),
    "swebench": Task("SWE-bench Lite", "swebench_lite_test"),
    "mt_bench": Task("MT-Bench", "mt_bench"),
    "alpaca": Task("Alpaca", "alpaca_1000", is_shipped=False),
}


@dataclass(frozen=True)
class TaskPrompts:
    name: str
    prompts: tuple[Prompt, ...]  # those to measure, in the order of their digests
    calibration: tuple[Prompt, ...]  # those to choose on
    source: dict[str, Any]  # file name and checksum

    def first_turns(self) -> "TaskPrompts":
        prompts, calibration = (
            tuple(replace(prompt, later_turns=()) for prompt in one) for one in (self.prompts, self.calibration)
        )
        return replace(self, prompts=prompts, calibration=calibration)


def default_tasks(data: Path | None) -> tuple[str, ...]:
    """Every set that is at hand."""
    return tuple(name for name, task in TASKS.items() if (task.is_shipped if data is None else _find(data, task)))


def read_task(name: str, *, data: Path | None, split: str, skip_bad: SkipBad | None = None) -> TaskPrompts:
    """A known set, from `data` or as it ships."""
    task = TASKS.get(name)
    if task is None:
        raise InputError(f"unknown task {name!r}; known: {', '.join(TASKS)}; your own prompts go in with --prompts")
    if data is None:
        if not task.is_shipped:
            raise InputError(
                f"task {name} does not ship because of its licence: give --data DIR with {task.file}.jsonl"
            )
        return read_file(SHIPPED / f"{name}.jsonl.gz", name=name, split=split, skip_bad=skip_bad)
    if (path := _find(data, task)) is None:
        raise InputError(f"task {name}: {data} holds no {task.file}{SUFFIXES[0]} (or .xz, or uncompressed)")
    return read_file(path, name=name, split=split, skip_bad=skip_bad)


def read_file(path: Path, *, name: str | None = None, split: str, skip_bad: SkipBad | None = None) -> TaskPrompts:
    """The prompts of a file; a file of the user's own is a task named by its stem."""
    name = path.name.split(".")[0] if name is None else name
    prompts = sort_prompts(read_prompts(path, skip_bad=skip_bad))
    if repeated := _find_repeated([prompt.id for prompt in prompts]):
        raise InputError(f"prompt file {path}: two prompts have the id {repeated!r}")
    chosen = [p for p in prompts if split == "all" or p.is_calibration == (split == "calibration")]
    if not chosen:
        raise InputError(f"prompt file {path} has no {split} prompts (ids decide): use --split all")
    source = {"file": path.name, "sha256": hash_file(path)}
    return TaskPrompts(name, tuple(chosen), tuple(p for p in prompts if p.is_calibration), source)


def sort_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: prompt.digest)


def _find(data: Path, task: Task) -> Path | None:
    if not data.is_dir():
        raise InputError(f"--data {data} is no folder")
    return next((path for suffix in SUFFIXES if (path := data / f"{task.file}{suffix}").is_file()), None)


def _find_repeated(ids: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((found for found in ids if found in seen or seen.add(found)), None)  # type: ignore[func-returns-value]
