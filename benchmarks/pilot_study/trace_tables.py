"""Traces as tables: what every request would have got at every fixed block size.

A table holds tau [requests, sizes] over all steps of the walk, over its loop-free ones, and over parts of it (first and
second half of the answer, odd and even steps) for checks of noise. It also keeps what the steps of each walk look like,
so that any step costs can be put on them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.costs import SimulatedStep
from blockpilot.replay.simulate import walk_chain
from blockpilot.replay.trace_files import TraceSet
from blockpilot.replay.traces import Trace
from blockpilot.text.loops import find_loop
from pilot_study.intervals import Values

PARTS = ("whole", "loop_free", "first", "second", "odd", "even")
SAME = ("target", "drafter", "drafter_sha256", "dtype", "temperature", "vocab_size", "trained_block_size", "sizes")

Shapes = Counter[tuple[int, int]]  # (block size, verify size) -> number of steps


def read_traces(folders: Sequence[Path], *, like: Mapping[str, Any] | None, num_drafted: int) -> list[Trace]:
    """All traces of folders that were collected alike. Candidates are kept of about `num_drafted`, spread evenly."""
    sets = [TraceSet(folder) for folder in folders]
    first = like or sets[0].manifest
    for found in sets:
        for key in SAME:
            if found.manifest.get(key) != first.get(key):
                raise InputError(
                    f"{found.folder} was collected otherwise: {key} is {found.manifest.get(key)!r} there and "
                    f"{first.get(key)!r} elsewhere"
                )
    every = max(1, sum(map(len, sets)) // max(num_drafted, 1))
    traces = (trace for found in sets for trace in found if trace.num_anchors)
    return [
        trace if num_drafted and place % every == 0 else replace(trace, drafts={}) for place, trace in enumerate(traces)
    ]


def check_disjoint(train: Sequence[Trace], test: Sequence[Trace]) -> None:
    seen = {(trace.task, trace.prompt_id) for trace in train}
    if both := [trace for trace in test if (trace.task, trace.prompt_id) in seen]:
        raise InputError(f"{len(both)} prompts are in training and test traces, such as {both[0].prompt_id!r}")


@dataclass(frozen=True)
class SizeTable:
    """Rows are requests, columns block sizes."""

    sizes: tuple[int, ...]
    tasks: tuple[str, ...]  # [N]
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
                for name, value in part_taus(steps, trace.num_anchors, loop).items():
                    parts[name][row, column] = value
            shapes.append(tuple(Counter((step.block_size, step.verify_size) for step in steps) for steps in walks))
        return cls(tuple(sizes), tuple(trace.task for trace in traces), parts, tuple(shapes))

    @property
    def tau(self) -> Values:
        return self.parts["whole"]

    def columns(self, sizes: Sequence[int], part: str = "whole") -> Values:
        """tau [N, len(sizes)]."""
        return self.parts[part][:, [self.sizes.index(size) for size in sizes]]

    def at(self, chosen: NDArray[np.int64], part: str = "whole") -> Values:
        """tau [N] at one size per request."""
        return self.parts[part][np.arange(len(self)), [self.sizes.index(int(size)) for size in chosen]]

    def milliseconds(self, costs: StepCosts) -> Values:
        """[N, S] of whole answers, for costs that do not depend on the context."""
        prices: dict[tuple[int, int], float] = {}

        def price(shape: tuple[int, int]) -> float:
            if shape not in prices:
                prices[shape] = costs.step_ms(*shape)
            return prices[shape]

        rows = [[sum(n * price(shape) for shape, n in one.items()) for one in row] for row in self.shapes]
        return np.array(rows, dtype=np.float64)

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
            {name: tau[kept] for name, tau in self.parts.items()},
            tuple(self.shapes[row] for row in kept),
        )

    def __len__(self) -> int:
        return len(self.tasks)


def part_taus(steps: Sequence[SimulatedStep], num_anchors: int, loop: int) -> dict[str, float]:
    """tau of the parts of one walk. A step belongs to the half of the answer that its anchor lies in."""
    emitted = np.array([step.emitted for step in steps], dtype=np.float64)
    anchors = np.array([step.anchor for step in steps])
    places = np.arange(len(steps))
    kept = {
        "whole": places >= 0,
        "loop_free": anchors < loop,
        "first": anchors < num_anchors / 2,
        "second": anchors >= num_anchors / 2,
        "odd": places % 2 == 0,  # the first, third, ... step
        "even": places % 2 == 1,
    }
    return {name: float(emitted[mask].mean()) if mask.any() else float("nan") for name, mask in kept.items()}
