"""What benchmark tests share: answers made by hand, and a run of tiny models."""

from pathlib import Path
from typing import Any

from blockpilot.bench.answers import Answer
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.methods import parse_methods
from blockpilot.bench.reference import read_reference
from blockpilot.bench.run import BenchResult, run_bench
from blockpilot.bench.site import BenchSetup
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.config import EngineConfig
from blockpilot.text.prompts import Prompt
from tests.tiny import make_dflash
from tests.unit.training.pieces import chat_target

SOURCE = {"file": "quiz.jsonl", "sha256": ""}
CALIBRATION = Prompt("c3", "abc abc")
QUIZ = TaskPrompts("quiz", tuple(Prompt(f"q{i}", f"what is {i}") for i in range(3)), (CALIBRATION,), SOURCE)
TALK = TaskPrompts("talk", (Prompt("t0", "say it", ("again",)), Prompt("t1", "once", ("twice",))), (), SOURCE)


def make_answer(emitted: list[int], *, method: str = "ar", seconds: float = 1.0, **values: Any) -> Answer:
    """An answer whose tokens are all different, with blocks of 4."""
    settings: dict[str, Any] = {
        "task": "quiz",
        "prompt_id": "q0",
        "batch": 0,
        "turn": 0,
        "repeat": 0,
        "token_ids": list(range(1 + sum(emitted))),
        "text": "text",
        "num_prompt_tokens": 5,
        "finish_reason": "length",
        "block_sizes": [4] * len(emitted),
        "verify_sizes": [4] * len(emitted),
        "prefill_seconds": 0.5,
        "draft_seconds": 0.2 * seconds,
        "verify_seconds": 0.6 * seconds,
        "pilot_seconds": 0.1 * seconds,
        "peak_memory_bytes": 100,
    }
    return Answer(method=method, emitted=emitted, decode_seconds=seconds, **(settings | values))


def ignore(*values: object) -> None:
    """A report that nobody reads."""


def make_setup(
    methods: str = "ar,dflash:3",
    tasks: tuple[TaskPrompts, ...] = (QUIZ, TALK),
    pilot_folder: Path | None = None,
    reference: Path | None = None,
    **settings: Any,
) -> BenchSetup:
    parsed = parse_methods(methods.split(","), device="cpu", target="tiny", pilot_folder=pilot_folder)
    values = {"max_new_tokens": 8} | settings
    config = BenchConfig(
        tasks=tuple(task.name for task in tasks), methods=tuple(method.name for method in parsed), **values
    )
    drafters = {"dflash": make_dflash(is_second=True), "ngram": "ngram"}
    return BenchSetup(
        config=config,
        methods=parsed,
        tasks=tasks,
        target=chat_target(),
        drafters={kind: drafters[kind] for kind in {method.drafter for method in parsed} & drafters.keys()},
        engine=EngineConfig(linear_backend="plain"),
        reference=None if reference is None else read_reference(reference),
    )


def run_tiny(out: Path, methods: str = "ar,dflash:3", **settings: Any) -> BenchResult:
    return run_bench(make_setup(methods, **settings), out, ignore)
