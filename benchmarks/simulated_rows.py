"""Rows and table of `simulated_speed.py`: what was measured beside what was simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockpilot.bench.answers import Answer, select
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.statistics import Measured, add_up, speedup, speedup_interval, split_steps
from blockpilot.cli.console import print_columns
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.simulate import SimulatedStep, total

TOLERANCE = 0.07
MEAN = "mean"
Row = dict[str, Any]


@dataclass(frozen=True)
class Walk:
    """One method's simulated steps through one replayed answer."""

    answer_ids: list[int]
    steps: list[SimulatedStep]

    def is_same_answer(self, answer: Answer) -> bool:
        return answer.token_ids == self.answer_ids

    def is_same_steps(self, answer: Answer) -> bool:
        online = zip(answer.block_sizes, answer.verify_sizes, answer.emitted, strict=True)
        return list(online) == [(step.block_size, step.verify_size, step.emitted) for step in self.steps]


Walks = Mapping[tuple[str, str], Sequence[Walk]]  # task, method -> one per prompt, in order
Rates = Mapping[tuple[str, str], Measured]


def build_rows(answers: Sequence[Answer], walks: Walks, config: BenchConfig, costs: StepCosts) -> list[Row]:
    online = {key: add_up(select(answers, task=key[0], method=key[1])) for key in walks}
    simulated = {key: add_up_walks(found) for key, found in walks.items()}
    rows = []
    for task in config.tasks:
        for method in config.methods:
            found = select(answers, task=task, method=method)
            first = [answer for answer in found if answer.repeat == 0]
            pairs = list(zip(walks[task, method], first, strict=True))
            measured_parts, simulated_parts = split_steps(found), split_walks(walks[task, method], costs)
            rows.append(
                {
                    "task": task,
                    "method": method,
                    "num_prompts": len(first),
                    **compare_rates(task, method, online, simulated),
                    "measured_tau": mean([count for answer in first for count in answer.emitted]),
                    "simulated_tau": total(walk.steps for walk in walks[task, method]).tau,
                    "measured_step_ms": sum(measured_parts.values()) if measured_parts else None,
                    "simulated_step_ms": sum(simulated_parts.values()),
                    "measured_ms": measured_parts,
                    "simulated_ms": simulated_parts,
                    "same_answer": mean([walk.is_same_answer(answer) for walk, answer in pairs]),
                    "same_steps": mean([walk.is_same_steps(answer) for walk, answer in pairs]),
                }
            )
    if len(config.tasks) > 1:
        rows += [mean_row(rows, method, online, simulated, config.tasks) for method in config.methods]
    return rows


def compare_rates(task: str, method: str, online: Rates, simulated: Rates) -> Row:
    ours, theirs = simulated[task, method], online[task, method]
    ratio = speedup(ours, theirs)
    row: Row = {
        "measured_tokens_per_second": theirs.tokens_per_second,
        "simulated_tokens_per_second": ours.tokens_per_second,
        "ratio": ratio,
        "ratio_ci": speedup_interval([(ours, theirs)]),
        "is_within_tolerance": is_within(ratio),
        "measured_speedup": speedup(theirs, online[task, "ar"]),
        "simulated_speedup": speedup(ours, simulated[task, "ar"]),
    }
    return row | {"speedup_ratio": divide(row["simulated_speedup"], row["measured_speedup"])}


def mean_row(rows: Sequence[Row], method: str, online: Rates, simulated: Rates, tasks: Sequence[str]) -> Row:
    """Tasks weigh the same; the interval resamples prompts within their tasks."""
    own = [row for row in rows if row["method"] == method]
    row: Row = {"task": MEAN, "method": method, "num_prompts": sum(entry["num_prompts"] for entry in own)}
    row |= {name: mean_of([entry[name] for entry in own]) for name in own[0] if name not in row}
    row["ratio_ci"] = speedup_interval([(simulated[task, method], online[task, method]) for task in tasks])
    row["is_within_tolerance"] = is_within(row["ratio"])
    row["speedup_ratio"] = divide(row["simulated_speedup"], row["measured_speedup"])
    return row


def mean_of(values: Sequence[Any]) -> Any:
    """Of numbers, or of each part of a step; what is missing does not count."""
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], dict):
        return {name: mean([value[name] for value in known]) for name in known[0]}
    return mean(known) if known and not isinstance(known[0], list) else None


def add_up_walks(walks: Sequence[Walk]) -> Measured:
    tokens = np.array([sum(step.emitted for step in walk.steps) for walk in walks], dtype=np.float64)
    seconds = np.array([sum(step.milliseconds for step in walk.steps) for walk in walks], dtype=np.float64) / 1e3
    return Measured(tokens, seconds, seconds, tokens + 1)


def split_walks(walks: Sequence[Walk], costs: StepCosts) -> dict[str, float]:
    """Mean milliseconds of a simulated step's parts."""
    steps = [step for walk in walks for step in walk.steps]
    whole = mean([step.milliseconds for step in steps]) or 0.0
    draft = mean([costs.draft_ms(step.block_size) for step in steps]) or 0.0
    overhead = costs.overhead_ms if any(step.block_size > 1 for step in steps) else 0.0
    return {"draft": draft, "verify": whole - draft - overhead, "overhead": overhead}


def mean(values: Sequence[float]) -> float | None:
    return float(sum(values) / len(values)) if values else None


def divide(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def is_within(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) <= TOLERANCE


def show(rows: Sequence[Row]) -> None:
    """The mean over tasks, or the only task."""
    shown = [row for row in rows if row["task"] == MEAN] or rows
    pairs = {"tokens/s": "tokens_per_second", "tau": "tau", "step ms": "step_ms", "speedup": "speedup"}
    columns: dict[str, list[str]] = {"method": [row["method"] for row in shown]}
    for title, name in pairs.items():
        for side in ("measured", "simulated"):
            columns[f"{title} {side[:4]}."] = [number(row[f"{side}_{name}"]) for row in shown]
    columns["ratio"] = [number(row["ratio"], 3) + interval(row["ratio_ci"]) for row in shown]
    columns[f"within {100 * TOLERANCE:.0f} %"] = ["yes" if row["is_within_tolerance"] else "no" for row in shown]
    columns["speedup ratio"] = [number(row["speedup_ratio"], 3) for row in shown]
    columns["measured ms"] = [parts(row["measured_ms"]) for row in shown]
    columns["simulated ms"] = [parts(row["simulated_ms"]) for row in shown]
    columns["same answer, steps"] = [f"{row['same_answer']:.0%} {row['same_steps']:.0%}" for row in shown]
    print_columns(columns)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def parts(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else ", ".join(f"{name} {value:.2f}" for name, value in found.items())
