"""From answers to result rows: one per task and method, and one per method for the mean of the tasks.

A row starts with the fields every consumer may rely on; what follows serves the report. Tokens, steps and lengths are
those of the first repeat, times are pooled over all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockpilot.bench import statistics
from blockpilot.bench.answers import Answer, select
from blockpilot.bench.audit import Difference
from blockpilot.bench.config import BEST_FIXED, BEST_FIXED_TREE
from blockpilot.bench.statistics import Measured, add_up, divide, mean, speedup, speedup_interval

Row = dict[str, Any]
Scores = Mapping[tuple[str, str], Sequence[bool]]  # task, method -> right or wrong
_MEAN = "mean"
_AVERAGED: tuple[str, ...] = ("tau_mean", "tau_pooled", "tau_loop_free", "loop_share", "tokens_per_second", "speedup")
_AVERAGED += ("end_to_end_speedup", "time_to_first_token")
_SUMMED = ("num_prompts", "num_tokens", "num_steps", "mismatches", "near_ties")
_MEAN_FIELDS = {"task", "method", "model", "temperature", *_SUMMED, *_AVERAGED, "speedup_ci", "manifest"}
_MEAN_FIELDS |= {"largest_gap", "over_best_fixed", "over_best_fixed_tree", "over_best_chain"}


class _Speeds:
    """Tokens and seconds of every method on every task, and how methods compare. Tasks weigh the same."""

    def __init__(self, answers: Sequence[Answer], tasks: Sequence[str], methods: Sequence[str]) -> None:
        self.measured: dict[tuple[str, str | None], Measured] = {
            (task, method): add_up(select(answers, task=task, method=method)) for task in tasks for method in methods
        }
        self.chains = [method for method in methods if method.startswith("dflash:")]
        self.chain = self.fastest_chain(tasks)  # the best of the run

    def pairs(self, tasks: Sequence[str], method: str, other: str | None = "ar") -> list[tuple[Measured, Measured]]:
        return [(self.measured[task, method], self.measured[task, other]) for task in tasks]

    def ratio(self, tasks: Sequence[str], method: str, other: str | None = "ar") -> float | None:
        """The mean of the tasks' ratios."""
        return mean(speedup(*pair) for pair in self.pairs(tasks, method, other))

    def fastest_chain(self, tasks: Sequence[str]) -> str | None:
        """Of the dflash:B. Known only in hindsight, so no method can claim it."""
        return max(self.chains, key=lambda method: self.ratio(tasks, method) or 0.0, default=None)

    def over_references(self, tasks: Sequence[str], method: str) -> Row:
        """Against what was chosen on calibration prompts, and against one chain on all tasks, where they exist."""
        references = (BEST_FIXED, BEST_FIXED_TREE, self.chain)
        fixed, tree, chain = (self._compare(tasks, method, other) for other in references)
        found = {"over_best_fixed": fixed, "over_best_chain": chain and {"method": self.chain, **chain}}
        return found if tree is None else found | {"over_best_fixed_tree": tree}

    def _compare(self, tasks: Sequence[str], method: str, other: str | None) -> Row | None:
        if method == other or (tasks[0], other) not in self.measured:
            return None
        ratio = self.ratio(tasks, method, other)
        return None if ratio is None else {"ratio": ratio, "ci": speedup_interval(self.pairs(tasks, method, other))}


def build_rows(
    answers: Sequence[Answer],
    differences: Sequence[Difference],
    scores: Scores,
    *,
    tasks: Sequence[str],
    manifest: Mapping[str, Any],
) -> list[Row]:
    """Rows of these tasks and of the methods that the run's manifest names."""
    settings = manifest["arguments"]
    methods = settings["methods"]
    speeds, rows = _Speeds(answers, tasks, methods), []
    for task in tasks:
        best = speeds.fastest_chain([task])
        best_fixed = best and {"method": best, "speedup": speeds.ratio([task], best) or 0.0}
        for method in methods:
            found = select(answers, task=task, method=method)
            odd = [one for one in differences if (one.task, one.method) == (task, method)]
            row = {"task": task, "method": method, "model": manifest["target"]}
            row["temperature"] = settings["temperature"]
            ours, plain = speeds.measured[task, method], speeds.measured[task, "ar"]
            row |= _count(found) | {
                "tokens_per_second": ours.tokens_per_second,
                "speedup": speedup(ours, plain),
                "speedup_ci": speedup_interval([(ours, plain)]),
                "end_to_end_speedup": divide(ours.end_to_end_rate, plain.end_to_end_rate),
            }
            num_near_ties = sum(one.is_near_tie for one in odd)
            row |= {"mismatches": len(odd) - num_near_ties, "near_ties": num_near_ties}
            row |= {"manifest": manifest["id"], "largest_gap": _largest(one.gap for one in odd)}
            row |= speeds.over_references([task], method) | _describe(found)
            results = scores.get((task, method), ())  # none where the task cannot be scored
            row |= {"score": mean(results), "num_scored": len(results)}
            rows.append(row | {"best_fixed_of_task": best_fixed, "per_prompt": _per_prompt(found)})
    if len(tasks) > 1:
        rows += [_mean_row([row for row in rows if row["method"] == method], speeds) for method in methods]
    return rows


def _count(found: Sequence[Answer]) -> Row:
    first = [answer for answer in found if answer.repeat == 0]
    return {
        "num_prompts": len({answer.prompt_id for answer in first}),
        "num_tokens": sum(len(answer.token_ids) for answer in first),
        "num_steps": sum(len(answer.emitted) for answer in first),
        **statistics.count_lengths(first),
    }


def _describe(found: Sequence[Answer]) -> Row:
    first = [answer for answer in found if answer.repeat == 0]
    return {
        "emitted_histogram": statistics.histogram(count for answer in first for count in answer.emitted),
        "block_size_histogram": statistics.histogram(size for answer in first for size in answer.block_sizes),
        "verify_size_histogram": statistics.histogram(size for answer in first for size in answer.verify_sizes),
        "positions": statistics.count_positions(first),
        "milliseconds_per_step": statistics.split_steps(found),
        "time_to_first_token": mean(answer.prefill_seconds for answer in statistics.longest_answers(found)),
        "peak_memory_bytes": max((answer.peak_memory_bytes for answer in found), default=None),
    }


def _per_prompt(found: Sequence[Answer]) -> list[Row]:
    """As in the row of the task: tau is that of the first repeat, speed that of all of them."""
    talks: dict[str, list[Answer]] = {}
    for answer in found:
        talks.setdefault(answer.prompt_id, []).append(answer)
    return [
        {
            "id": prompt_id,
            "tau": mean(answer.tau for answer in talk if answer.repeat == 0),
            "tokens_per_second": divide(
                sum(sum(answer.emitted) for answer in talk), sum(answer.decode_seconds for answer in talk)
            ),
        }
        for prompt_id, talk in talks.items()
    ]


def _mean_row(rows: Sequence[Row], speeds: _Speeds) -> Row:
    """Tasks weigh the same, as in the paper's tables; the interval resamples prompts within their tasks."""
    tasks, method = [row["task"] for row in rows], rows[0]["method"]
    mean_row: Row = {name: value for name, value in rows[0].items() if name in _MEAN_FIELDS} | {"task": _MEAN}
    mean_row |= {name: sum(row[name] for row in rows) for name in _SUMMED}
    mean_row |= {name: mean(row[name] for row in rows) for name in _AVERAGED}
    mean_row["speedup_ci"] = speedup_interval(speeds.pairs(tasks, method))
    mean_row["largest_gap"] = _largest(row["largest_gap"] for row in rows)
    return mean_row | speeds.over_references(tasks, method)


def _largest(gaps: Iterable[float | None]) -> float | None:
    return max((gap for gap in gaps if gap is not None), default=None)
