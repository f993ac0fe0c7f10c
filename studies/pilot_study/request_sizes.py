"""Which fixed size suits a request best, how much that matters, and how much of it lasts.

The paper's figure of optimal sizes, with what it leaves out: how flat the optimum is, and whether the best size of
one half of an answer is still the better one in the other half. A preference that is a property of the request shows in
both halves; luck does not. Half an answer is noisier than a whole one, so what lasts is a cautious estimate.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pilot_study.intervals import Bootstrap, Values
from pilot_study.sweeps import flat_shares
from pilot_study.trace_tables import STRETCH, SizeTable

PAIRS = {"halves": ("first", "second"), f"every other {STRETCH} tokens": ("odd", "even")}
MIN_TOKENS = 2 * STRETCH


def best_fixed(table: SizeTable, sizes: Sequence[int]) -> int:
    """The size with the largest mean tau."""
    return sizes[int(table.columns(sizes).mean(axis=0).argmax())]


def optimal_rows(table: SizeTable, sizes: Sequence[int], trained: int) -> list[dict[str, Any]]:
    """Per task: how often each of `sizes` is best (the smallest where several are), and by how much."""
    rows = []
    for task, places in table.by_task():
        part = table.rows(places)
        tau, reference = part.columns(sizes), part.columns([trained])[:, 0]
        best = tau.max(axis=1)
        counts = np.bincount(tau.argmax(axis=1), minlength=len(sizes))
        rows.append(
            {
                "experiment": "optimal sizes",
                "task": task,
                "sizes": list(sizes),
                "num_requests": len(part),
                "counts": dict(zip(map(str, sizes), counts.tolist(), strict=True)),
                "ties": round(float(((tau == best[:, None]).sum(axis=1) > 1).mean()), 4),
                "best_fixed_in_hindsight": best_fixed(part, sizes),
                "best_beats_trained": flat_shares(tau, reference),
                "oracle_gain": Bootstrap(part.tasks).gain(best, reference).to_dict(),
            }
        )
    return rows


def split_rows(table: SizeTable, sizes: Sequence[int], *, trained: int, fixed: int) -> list[dict[str, Any]]:
    """Choose each request's size on one part of its answer, judge on the other; both ways, on average.

    `fixed` is the best fixed size, chosen on the training traces.
    """
    table = table.rows(np.flatnonzero(table.lengths >= MIN_TOKENS))
    if not len(table):
        return []
    rows = []
    for name, halves in PAIRS.items():
        for task, places in table.by_task():
            part = table.rows(places)
            judged = judge_halves(part, sizes, halves, references=(trained, fixed))
            rows.append({"experiment": "split", "split": name, "task": task, "num_requests": len(part)} | judged)
    return rows


def judge_halves(
    table: SizeTable, sizes: Sequence[int], halves: tuple[str, str], *, references: tuple[int, int]
) -> dict[str, Any]:
    """Means of both directions: the size chosen on the other half, the half's own oracle, and two fixed sizes."""
    first, second = (table.columns(sizes, half) for half in halves)
    chosen = (_at(second, first) + _at(first, second)) / 2
    oracle = (first.max(axis=1) + second.max(axis=1)) / 2
    trained, fixed = (np.mean([table.columns([size], half)[:, 0] for half in halves], axis=0) for size in references)
    bootstrap = Bootstrap(table.tasks)
    return {
        "sizes": list(sizes),
        "best_fixed": references[1],
        "gain_over_trained": bootstrap.gain(chosen, trained).to_dict(),
        "gain_over_best_fixed": bootstrap.gain(chosen, fixed).to_dict(),
        "oracle_gain_over_best_fixed": bootstrap.gain(oracle, fixed).to_dict(),
        "captured": bootstrap.captured(chosen, fixed, oracle).to_dict(),
        "same_choice": round(float((first.argmax(axis=1) == second.argmax(axis=1)).mean()), 4),
    }


def _at(values: Values, by: Values) -> Values:
    """`values` [N, S] where `by` is largest."""
    found: Values = values[np.arange(len(values)), by.argmax(axis=1)]
    return found
