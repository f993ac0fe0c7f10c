"""A small run as files: rows that a report can be checked against."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPEEDS = {"ar": 1.0, "ngram": 0.9, "dflash:4": 1.5, "dflash:8": 1.4, "dflash:16": 0.7, "best-fixed": 1.5, "auto": 1.75}
SPEEDS |= {"tree:15": 1.6, "eagle3-tree": 1.2}
TAUS = {"ar": 1.0, "ngram": 1.2, "dflash:4": 2.5, "dflash:8": 3.0, "dflash:16": 3.25, "best-fixed": 2.5, "auto": 2.75}
TAUS |= {"tree:15": 3.0, "eagle3-tree": 2.0}
COST_POINTS = [
    {"tokens": tokens, "ms": tokens + batch, "batch_size": batch, "context_length": 256}
    for batch in (1, 4)
    for tokens in (1, 4, 16)
]


def make_row(task: str, method: str, **values: Any) -> dict[str, Any]:
    speed = SPEEDS[method]
    depth = int(method.partition(":")[2]) - 1 if method.startswith("dflash") else 3
    row: dict[str, Any] = {
        "task": task,
        "method": method,
        "model": "tiny",
        "temperature": 0.0,
        "num_prompts": 2,
        "num_tokens": 100,
        "num_steps": 40,
        "tau_mean": TAUS[method],
        "tau_pooled": TAUS[method],
        "tau_loop_free": TAUS[method] - 0.125,
        "loop_share": 0.25,
        "tokens_per_second": 40 * speed,
        "speedup": speed,
        "speedup_ci": [speed - 0.05, speed + 0.05],
        "end_to_end_speedup": speed,
        "mismatches": 0,
        "near_ties": 0,
        "manifest": "abc",
        "largest_gap": None,
        "over_best_fixed": {"ratio": speed / 1.5, "ci": [speed / 1.5 - 0.05, speed / 1.5 + 0.05]},
        "over_best_chain": {"method": "dflash:4", "ratio": speed / 1.5, "ci": [speed / 1.5 - 0.05, speed / 1.5 + 0.05]},
    }
    if task != "mean":
        row |= {
            "positions": {"drafted": [40] * depth, "accepted": [40 // place for place in range(2, depth + 2)]},
            "milliseconds_per_step": {"draft": 5.0, "verify": 20.0, "pilot": 0.5, "other": 1.0},
            "time_to_first_token": 0.25,
            "score": 0.5,
            "num_scored": 2 if task == "gsm8k" else 0,
            "best_fixed_of_task": {"method": "dflash:4", "speedup": 1.5},
            "per_prompt": [{"id": name, "tau": TAUS[method], "tokens_per_second": 40 * speed} for name in "xy"],
        }
    return row | values


def write_run(
    folder: Path, rows: list[dict[str, Any]] | None = None, differences: Sequence[dict[str, Any]] = (), **manifest: Any
) -> Path:
    if rows is None:
        rows = [make_row(task, method) for task in ("gsm8k", "mt_bench", "mean") for method in SPEEDS]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("rows", rows), ("differences", differences)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    facts: dict[str, Any] = {
        "id": "abc",
        "device": "A processor",
        "dtype": "float32",
        "num_threads": 2,
        "near_tie_gap": 1e-4,
        "drafters": {"dflash": {"name": "small-drafter", "sha256": "00"}},
        "arguments": {"split": "test", "max_new_tokens": 16, "repeats": 1, "concurrency": 1},
        "sessions": [{"step_costs": {"verify": COST_POINTS, "draft": COST_POINTS[2:], "overhead_ms": 1.0}}],
        "best_fixed": {"size": 5, "size_by_task": {"gsm8k": 6, "mt_bench": 4}},
    }
    (folder / "manifest.json").write_text(json.dumps(facts | manifest), encoding="utf-8")
    sample = {
        "task": "gsm8k",
        "prompt_id": "x",
        "prompt": "How <many>?",
        "pieces": ["It", " is", " four", ".\n", "Done", "<b>"],
        "steps": {
            "ar": {"block_sizes": [1] * 5, "verify_sizes": [1] * 5, "emitted": [1] * 5},
            "auto": {"block_sizes": [4, 4], "verify_sizes": [6, 4], "emitted": [3, 2]},
        },
    }
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    return folder
