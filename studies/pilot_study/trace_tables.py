"""Traces as tables: what every request would have got at every fixed block size.

A table holds tau [requests, sizes] over all steps of the walk, over its loop-free ones, and over parts of the answer
(first and second half, odd and even stretches) for checks of noise. It also keeps what the steps of a walk look like:
any step costs can be put on them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.simulate import SimulatedStep, walk_chain
from blockpilot.replay.trace_files import TraceSet, require_alike
from blockpilot.replay.traces import Trace
from blockpilot.text.repetition import find_loop
from pilot_study.intervals import Values

PARTS = ("whole", "loop_free", "first", "second", "odd", "even")
STRETCH = 32  # tokens
DIGITS = 9  # of tau: what is equal shall be equal, whatever the order of sums
SAME = ("target", "drafter", "drafter_sha256", "dtype", "temperature", "vocab_size", "trained_block_size", "sizes")

Shapes = Counter[tuple[int, int]]  # (block size, verify size) -> number of steps


def read_traces(folders: Sequence[Path], *, like: Mapping[str, Any] | None, num_drafted: int) -> list[Trace]:
    """All traces of folders that were collected alike. Candidates are kept of about `num_drafted`, spread evenly."""
    sets = [TraceSet(folder) for folder in folders]
    require_alike(sets, SAME, like)
    num_held = sum(len(found) for found in sets if found.manifest["draft_sizes"])
    every = max(1, num_held // max(num_drafted, 1))
    traces, place = [], 0
    for trace in (trace for found in sets for trace in found if trace.num_anchors):
        is_kept = num_drafted > 0 and place % every == 0
        place += bool(trace.drafts)
        traces.append(trace if is_kept else replace(trace, drafts={}))
    return traces


@dataclass(frozen=True)
class SizeTable:
    """Rows are requests, columns block sizes."""

    sizes: tuple[int, ...]
    tasks: tuple[str, ...]  # [N]
    lengths: NDArray[np.int64]  # [N], tokens that steps emit
    parts: Mapping[str, Values]  # by name in PARTS: tau [N, S]; NaN where a part has no step
    shapes: tuple[tuple[Shapes, ...], ...]  # [N][S]

    @classmethod
    def of(cls, traces: Sequence[Trace], sizes: Sequence[int]) -> "SizeTable":
        parts = {name: np.empty((len(traces), len(sizes))) for name in PARTS}
        shapes = []
        for row, trace in enumerate(traces):
            loop = find_loop(trace.answer_ids.tolist())
            walks = [walk_chain(trace, size) for size in sizes]
            for column, steps in enumerate(walks):
                for name, value in part_taus(steps, loop).items():
                    parts[name][row, column] = value
            shapes.append(tuple(Counter((step.block_size, step.verify_size) for step in steps) for steps in walks))
        lengths = np.array([trace.num_anchors for trace in traces])
        return cls(tuple(sizes), tuple(trace.task for trace in traces), lengths, parts, tuple(shapes))

    @property
    def tau(self) -> Values:
        return self.parts["whole"]

    def columns(self, sizes: Sequence[int], part: str = "whole") -> Values:
        """tau [N, len(sizes)]."""
        return self.parts[part][:, [self.sizes.index(size) for size in sizes]]

    def at(self, chosen: NDArray[np.int64], part: str = "whole") -> Values:
        """tau [N] at one size per request."""
        return self.parts[part][np.arange(len(self)), [self.sizes.index(int(size)) for size in chosen]]

    def describe_taus(self) -> dict[str, Any]:
        """For JSON: what `of_taus` reads."""
        return {"sizes": list(self.sizes), "tasks": list(self.tasks), "tau": self.parts["whole"].tolist()}

    @classmethod
    def of_taus(cls, found: Mapping[str, Any]) -> "SizeTable":
        """Whole answers alone, without what their steps look like."""
        tau = np.array(found["tau"], dtype=np.float64)
        none = np.zeros(len(tau), dtype=np.int64)
        return cls(tuple(found["sizes"]), tuple(found["tasks"]), none, {"whole": tau}, ((),) * len(tau))

    def milliseconds(self, costs: StepCosts) -> Values:
        """[N, S] of whole answers, for costs that do not depend on the context."""
        prices: dict[tuple[int, int], float] = {}

        def price(shape: tuple[int, int]) -> float:
            if shape not in prices:
                prices[shape] = costs.step_ms(*shape)
            return prices[shape]

        rows = [[sum(n * price(shape) for shape, n in one.items()) for one in row] for row in self.shapes]
        return np.array(rows, dtype=np.float64)

    @property
    def overall(self) -> str:
        """What all requests together are called: `all`, or their only task."""
        return "all" if len(set(self.tasks)) > 1 else self.tasks[0]

    def by_task(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Task names with their rows, and `all` where there are several."""
        names = np.array(self.tasks)
        tasks = sorted(set(self.tasks))
        for task in tasks:
            yield task, np.flatnonzero(names == task)
        if len(tasks) > 1:
            yield "all", np.arange(len(names))

    def rows(self, kept: NDArray[np.int64]) -> "SizeTable":
        return SizeTable(
            self.sizes,
            tuple(self.tasks[row] for row in kept),
            self.lengths[kept],
            {name: tau[kept] for name, tau in self.parts.items()},
            tuple(self.shapes[row] for row in kept),
        )

    def __len__(self) -> int:
        return len(self.tasks)


def part_taus(steps: Sequence[SimulatedStep], loop: int) -> dict[str, float]:
    """tau of one walk and of parts of its answer.

    A token costs its share of the step that emitted it, so a part has the same tokens at every block size. Splitting
    by steps instead would not do: a walk's steps add up to the answer, and what odd ones gain even ones must lose.
    """
    emitted = np.array([step.emitted for step in steps])
    shares = np.repeat(1 / emitted, emitted)  # [A], steps per token
    places = np.arange(len(shares))
    kept = {
        "whole": places >= 0,
        "first": places < len(places) // 2,
        "second": places >= len(places) // 2,
        "odd": places // STRETCH % 2 == 0,  # the first, third, ... stretch
        "even": places // STRETCH % 2 == 1,
    }
    means = {name: float(shares[mask].mean()) if mask.any() else float("nan") for name, mask in kept.items()}
    taus = {name: round(1 / mean, DIGITS) for name, mean in means.items()}
    is_free = np.array([step.anchor < loop for step in steps])
    return taus | {"loop_free": float(emitted[is_free].mean())}
