"""From answers to result rows: one per task and method, and one per method for the mean of the tasks.

A row starts with the fields every consumer may rely on; what follows serves the report. Tokens, steps and lengths are
those of the first repeat, times are pooled over all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockpilot.bench.answers import Answer, select
from blockpilot.bench.audit import Difference
from blockpilot.bench.methods import BEST_FIXED
from blockpilot.bench.statistics import (
    Measured,
    add_up,
    count_lengths,
    count_positions,
    end_to_end_speedup,
    histogram,
    longest_answers,
    speedup,
    speedup_interval,
    split_steps,
)

Row = dict[str, Any]
MEAN = "mean"
AVERAGED: tuple[str, ...] = ("tau_mean", "tau_pooled", "tau_loop_free", "loop_share", "tokens_per_second", "speedup")
AVERAGED += ("end_to_end_speedup", "time_to_first_token")
SUMMED = ("num_prompts", "num_tokens", "num_steps", "mismatches", "near_ties")
_MEAN_FIELDS = {"task", "method", "model", "temperature", *SUMMED, *AVERAGED, "speedup_ci", "manifest"}
_MEAN_FIELDS |= {"largest_gap", "over_best_fixed", "over_best_chain"}


@dataclass(frozen=True)
class RowFacts:
    """What is the same in all rows of a run."""

    model: str
    temperature: float
    manifest: str  # the id that the manifest carries
    tasks: tuple[str, ...]
    methods: tuple[str, ...]


Scores = Mapping[tuple[str, str], Sequence[bool]]  # task, method -> right or wrong


def build_rows(
    answers: Sequence[Answer], differences: Sequence[Difference], scores: Scores, facts: RowFacts
) -> list[Row]:
    measured = {
        (task, method): add_up(select(answers, task=task, method=method))
        for task in facts.tasks
        for method in facts.methods
    }
    rows = []
    chain = _best_chain(measured, facts)
    for task in facts.tasks:
        best = _best_fixed(task, measured, facts.methods)
        for method in facts.methods:
            found = select(answers, task=task, method=method)
            row = _task_row(task, method, found, measured, differences, facts)
            row["over_best_chain"] = _over_best_chain([task], method, chain, measured)
            row |= _describe(found) | _score(scores.get((task, method)))
            rows.append(row | {"best_fixed_of_task": best, "per_prompt": _per_prompt(found)})
    if len(facts.tasks) > 1:
        rows += [_mean_row(method, chain, rows, measured, facts) for method in facts.methods]
    return rows


def _task_row(
    task: str,
    method: str,
    found: Sequence[Answer],
    measured: Mapping[tuple[str, str], Measured],
    differences: Sequence[Difference],
    facts: RowFacts,
) -> Row:
    ours, plain = measured[task, method], measured[task, "ar"]
    first = [answer for answer in found if answer.repeat == 0]
    lengths = count_lengths(first)
    odd = [difference for difference in differences if (difference.task, difference.method) == (task, method)]
    gaps = [difference.best_gap for difference in odd if difference.best_gap is not None]
    return {
        "task": task,
        "method": method,
        "model": facts.model,
        "temperature": facts.temperature,
        "num_prompts": len({answer.prompt_id for answer in first}),
        "num_tokens": sum(len(answer.token_ids) for answer in first),
        "num_steps": sum(len(answer.emitted) for answer in first),
        "tau_mean": lengths.tau_mean,
        "tau_pooled": lengths.tau_pooled,
        "tau_loop_free": lengths.tau_loop_free,
        "loop_share": lengths.loop_share,
        "tokens_per_second": ours.tokens_per_second,
        "speedup": speedup(ours, plain),
        "speedup_ci": speedup_interval([(ours, plain)]),
        "end_to_end_speedup": end_to_end_speedup(ours, plain),
        "mismatches": sum(not difference.is_near_tie for difference in odd),
        "near_ties": sum(difference.is_near_tie for difference in odd),
        "manifest": facts.manifest,
        "largest_gap": max(gaps, default=None),
        "over_best_fixed": _over_best_fixed([task], method, measured),
    }


def _describe(found: Sequence[Answer]) -> Row:
    first = [answer for answer in found if answer.repeat == 0]
    prefills = [answer.prefill_seconds for answer in longest_answers(found)]
    return {
        "emitted_histogram": histogram(count for answer in first for count in answer.emitted),
        "block_size_histogram": histogram(size for answer in first for size in answer.block_sizes),
        "verify_size_histogram": histogram(size for answer in first for size in answer.verify_sizes),
        "positions": count_positions(first),
        "milliseconds_per_step": split_steps(found),
        "time_to_first_token": sum(prefills) / len(prefills) if prefills else None,
        "peak_memory_bytes": max((answer.peak_memory_bytes for answer in found), default=None),
    }


def _score(results: Sequence[bool] | None) -> Row:
    """Share of right answers, where the task can be scored."""
    if not results:
        return {"score": None, "num_scored": 0}
    return {"score": sum(results) / len(results), "num_scored": len(results)}


def _per_prompt(found: Sequence[Answer]) -> list[Row]:
    by_prompt: dict[str, list[Answer]] = {}
    for answer in found:
        by_prompt.setdefault(answer.prompt_id, []).append(answer)
    return [
        {
            "id": prompt_id,
            "tau": count_lengths(talk).tau_mean,
            "tokens_per_second": (
                sum(sum(a.emitted) for a in talk) / seconds
                if (seconds := sum(a.decode_seconds for a in talk))
                else None
            ),
        }
        for prompt_id, talk in by_prompt.items()
    ]


def _best_fixed(
    task: str, measured: Mapping[tuple[str, str], Measured], methods: Sequence[str]
) -> dict[str, Any] | None:
    """The fastest dflash:B measured on this task. Known only in hindsight, so no method can claim it."""
    plain = measured[task, "ar"]
    found = {m: speedup(measured[task, m], plain) or 0.0 for m in methods if m.startswith("dflash:")}
    if not found:
        return None
    best = max(found, key=found.__getitem__)
    return {"method": best, "speedup": found[best]}


def _over_best_fixed(
    tasks: Sequence[str], method: str, measured: Mapping[tuple[str, str], Measured]
) -> dict[str, Any] | None:
    """Against the size chosen on calibration prompts, where it was measured."""
    if (tasks[0], BEST_FIXED) not in measured or method == BEST_FIXED:
        return None
    return _compare(tasks, method, BEST_FIXED, measured)


def _best_chain(measured: Mapping[tuple[str, str], Measured], facts: RowFacts) -> str | None:
    """The dflash:B that is the fastest of the run, tasks weighing the same. Known only in hindsight."""

    def mean_speedup(method: str) -> float:
        speeds = [speedup(measured[task, method], measured[task, "ar"]) for task in facts.tasks]
        known = [speed for speed in speeds if speed is not None]
        return sum(known) / len(known) if known else 0.0

    chains = [method for method in facts.methods if method.startswith("dflash:")]
    return max(chains, key=mean_speedup, default=None)


def _over_best_chain(
    tasks: Sequence[str], method: str, chain: str | None, measured: Mapping[tuple[str, str], Measured]
) -> dict[str, Any] | None:
    """Against one chain on all tasks, the best of the run."""
    if chain is None or method == chain:
        return None
    found = _compare(tasks, method, chain, measured)
    return found and {"method": chain, **found}


def _compare(
    tasks: Sequence[str], method: str, other: str, measured: Mapping[tuple[str, str], Measured]
) -> dict[str, Any] | None:
    """The mean of the tasks' ratios, and its interval."""
    pairs = [(measured[task, method], measured[task, other]) for task in tasks]
    ratios = [ratio for pair in pairs if (ratio := speedup(*pair)) is not None]
    return {"ratio": sum(ratios) / len(ratios), "ci": speedup_interval(pairs)} if ratios else None


def _mean_row(
    method: str,
    chain: str | None,
    rows: Sequence[Row],
    measured: Mapping[tuple[str, str], Measured],
    facts: RowFacts,
) -> Row:
    """Tasks weigh the same, as in the paper's tables; the interval resamples prompts within their tasks."""
    own = [row for row in rows if row["method"] == method and row["task"] != MEAN]
    row: Row = {name: own[0][name] for name in own[0] if name in _MEAN_FIELDS} | {"task": MEAN}
    for name in SUMMED:
        row[name] = sum(entry[name] for entry in own)
    for name in AVERAGED:
        values = [entry[name] for entry in own if entry[name] is not None]
        row[name] = sum(values) / len(values) if values else None
    row["speedup_ci"] = speedup_interval([(measured[task, method], measured[task, "ar"]) for task in facts.tasks])
    row["largest_gap"] = max((e["largest_gap"] for e in own if e["largest_gap"] is not None), default=None)
    row["over_best_fixed"] = _over_best_fixed(facts.tasks, method, measured)
    row["over_best_chain"] = _over_best_chain(facts.tasks, method, chain, measured)
    return row
