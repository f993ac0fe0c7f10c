"""Predictors that a table of sweeps allows, judged on samples they were not fitted to.

None sees the tau it is judged on: of the sample in question it knows at most tau at sizes that it may not choose. That
is more than a predictor before the first step could know, so these are generous.

Leaving one out punishes close races: a sample that favours 16 is missing exactly where 16 should be chosen for it. With
two sizes nearly level the mean of leave-one-out choices falls below both. Fitting on another task has no such flaw.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pilot_study.intervals import Values
from pilot_study.sweeps import Sweep

Sizes = tuple[int, ...]
Choice = NDArray[np.int64]
Predictor = Callable[[Sweep, Sweep], Choice]  # (fitted to, chooses for) -> a block size per sample


def best_fixed(candidates: Sizes) -> Predictor:
    """Knows nothing of the sample: the size that was best on average."""

    def choose(train: Sweep, test: Sweep) -> Choice:
        return np.full(len(test), candidates[int(train.columns(candidates).mean(axis=0).argmax())])

    return choose


def nearest_neighbours(features: Sizes, candidates: Sizes, count: int) -> Predictor:
    """The size that was best on average for the `count` samples most alike in tau at the sizes of `features`."""

    def choose(train: Sweep, test: Sweep) -> Choice:
        known, asked = _scale(train, test, features)
        distances = np.linalg.norm(asked[:, None] - known[None], axis=-1)
        neighbours = distances.argsort(axis=1, kind="stable")[:, :count]
        return _pick(candidates, _shapes(train, candidates)[neighbours].mean(axis=1))

    return choose


def ridge(features: Sizes, candidates: Sizes, strength: float) -> Predictor:
    """The size whose tau, predicted linearly from tau at the sizes of `features`, is largest."""

    def choose(train: Sweep, test: Sweep) -> Choice:
        known, asked = _scale(train, test, features)
        shapes = _shapes(train, candidates)
        weights = np.linalg.solve(known.T @ known + strength * np.eye(len(features)), known.T @ shapes)
        return _pick(candidates, shapes.mean(axis=0) + asked @ weights)

    return choose


def leave_one_out(predictor: Predictor, sweep: Sweep) -> Choice:
    chosen = []
    for row in range(len(sweep)):
        is_rest = np.arange(len(sweep)) != row
        chosen.append(int(predictor(_rows(sweep, is_rest), _rows(sweep, ~is_rest))[0]))
    return np.array(chosen)


def _pick(candidates: Sizes, scores: Values) -> Choice:
    """The candidate with the largest score in every row [N, C]."""
    chosen: Choice = np.array(candidates)[scores.argmax(axis=1)]
    return chosen


def _rows(sweep: Sweep, kept: NDArray[np.bool_]) -> Sweep:
    tasks = tuple(task for task, is_kept in zip(sweep.tasks, kept, strict=True) if is_kept)
    return replace(sweep, tau=sweep.tau[kept], released=sweep.released[kept], tasks=tasks)


def _scale(train: Sweep, test: Sweep, features: Sizes) -> tuple[Values, Values]:
    """log tau [N, F] of both, in units that give the first mean 0 and deviation 1."""
    known, asked = np.log(train.columns(features)), np.log(test.columns(features))
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    return (known - mean) / deviation, (asked - mean) / deviation


def _shapes(sweep: Sweep, candidates: Sizes) -> Values:
    """log tau [N, C] of the candidates against their own mean: which size suits, not how easy the sample is."""
    logs = np.log(sweep.columns(candidates))
    shapes: Values = logs - logs.mean(axis=1, keepdims=True)
    return shapes
