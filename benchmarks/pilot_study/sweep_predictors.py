"""Predictors that a table of sweeps allows, each judged on samples it was not fitted to.

None sees the tau it is judged on: of the sample in question it knows at most tau at sizes that it may not choose. That is
more than a predictor before the first step could know, so these are generous.
"""

import numpy as np
from numpy.typing import NDArray

from pilot_study.intervals import Values
from pilot_study.sweeps import Sweep

Choice = NDArray[np.int64]


def leave_one_out_fixed(sweep: Sweep, candidates: tuple[int, ...]) -> Choice:
    """Uses nothing of the sample: the size that is best on average for the others."""
    tau = sweep.columns(candidates)
    others = tau.sum(axis=0) - tau  # [N, C]
    return np.array(candidates)[others.argmax(axis=1)]


def nearest_neighbours(sweep: Sweep, features: tuple[int, ...], candidates: tuple[int, ...], count: int) -> Choice:
    """The size that was best on average for the `count` samples most alike in tau at the sizes of `features`."""
    inputs, shapes = _inputs(sweep, features), _shapes(sweep, candidates)
    distances = np.linalg.norm(inputs[:, None] - inputs[None], axis=-1)
    np.fill_diagonal(distances, np.inf)  # never the sample itself
    neighbours = distances.argsort(axis=1, kind="stable")[:, :count]
    return np.array(candidates)[shapes[neighbours].mean(axis=1).argmax(axis=1)]


def ridge(sweep: Sweep, features: tuple[int, ...], candidates: tuple[int, ...], strength: float) -> Choice:
    """The size whose tau, predicted linearly from tau at the sizes of `features`, is largest."""
    inputs, shapes = _inputs(sweep, features), _shapes(sweep, candidates)
    chosen = []
    for row in range(len(sweep)):
        rest = np.arange(len(sweep)) != row
        centre, mean = inputs[rest].mean(axis=0), shapes[rest].mean(axis=0)
        x, y = inputs[rest] - centre, shapes[rest] - mean
        weights = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)
        chosen.append(int((mean + (inputs[row] - centre) @ weights).argmax()))
    return np.array(candidates)[chosen]


def _inputs(sweep: Sweep, features: tuple[int, ...]) -> Values:
    """log tau [N, F], each column with mean 0 and deviation 1."""
    logs = np.log(sweep.columns(features))
    scaled: Values = (logs - logs.mean(axis=0)) / logs.std(axis=0)
    return scaled


def _shapes(sweep: Sweep, candidates: tuple[int, ...]) -> Values:
    """log tau [N, C] of the candidates against their own mean: which size suits, not how easy the sample is."""
    logs = np.log(sweep.columns(candidates))
    shapes: Values = logs - logs.mean(axis=1, keepdims=True)
    return shapes
