"""The loops of `pilots/forecast.py`."""

import numpy as np
from numba import boolean, float32, float64, int64

from blockpilot.pilots.compiled.jit import compiled, helper
from blockpilot.pilots.forecast import (
    CHECK_MARGIN,
    LEVEL_SHARES,
    MIN_MEAN,
    NUM_LEVELS,
    SIZE_MARGIN,
    TIE,
    TREE_EXPONENT,
    TREE_REACH,
)


@helper
def _rounded(value):  # type: ignore[no-untyped-def]  # pragma: no cover
    """As `Recent.features` are."""
    return float64(np.float32(value))


@helper
def _fitted_curves(curves, weights, average, last, expected, has_drafted):  # type: ignore[no-untyped-def]  # pragma: no cover
    """`Forecast.expected` with a fit into `curves` [sizes, levels, nodes + 1]."""
    for size in range(curves.shape[0]):
        for level in range(NUM_LEVELS):
            weight, curve = weights[size, level], curves[size, level]
            curve[0] = 1
            for node in range(len(curve) - 1):
                logit = weight[0, node] + weight[1, node] * average + weight[2, node] * last
                logit += weight[3, node] * expected + weight[4, node] * has_drafted
                curve[node + 1] = 1 / (1 + np.exp(-logit))
            for node in range(len(curve) - 1):
                curve[node + 1] += curve[node]


@helper
def _geometric_curves(curves, mean, draft_sizes, is_chain):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The same without one."""
    for level in range(NUM_LEVELS):
        share = 1 - 1 / max(1 + LEVEL_SHARES[level] * (mean - 1), MIN_MEAN)
        reach = share if is_chain else share**TREE_REACH
        total = 1.0
        for node in range(curves.shape[2]):
            if node:
                total += share ** (float64(node) if is_chain else node**TREE_EXPONENT)
            for size in range(curves.shape[0]):
                curves[size, level, node] = total
        for size in range(curves.shape[0]):
            limit = (1 - reach ** draft_sizes[size]) / (1 - reach)
            for node in range(1, curves.shape[2]):
                curves[size, level, node] = min(curves[size, level, node], limit)


@helper
def _best_rate(curves, step_ms, num_remaining):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The draft size to choose, and its rate."""
    chosen = count = len(curves)
    chosen_rate = 0.0
    for size in range(count - 1, -1, -1):
        tokens = ms = 0.0
        for level in range(NUM_LEVELS):
            best, best_rate = 0, -1.0
            for node in range(curves.shape[2]):
                value = min(curves[size, level, node], num_remaining)
                if size < count - 1:  # a larger draft shows what a smaller one does
                    value = min(value, curves[size + 1, level, node])
                curves[size, level, node] = value
                if value / step_ms[size, node] > best_rate:
                    best, best_rate = node, value / step_ms[size, node]
            tokens += curves[size, level, best]
            ms += step_ms[size, best]
        if chosen == count or tokens / ms > SIZE_MARGIN * chosen_rate:
            chosen, chosen_rate = size, tokens / ms
    return chosen, chosen_rate


@helper
def _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted):  # type: ignore[no-untyped-def]  # pragma: no cover
    """`Forecast.expected` of the smallest sizes; `weights` [sizes, levels, features, nodes] are empty without a fit."""
    if len(weights):
        features = _rounded(average), _rounded(last), _rounded(expected), float64(has_drafted)
        _fitted_curves(curves, weights, *features)
    else:
        _geometric_curves(curves, (average + expected) / 2 if has_drafted else average, draft_sizes, is_chain)


@compiled(
    float32[:, :, :, ::1], float64[::1], boolean, float64, float64, float64, boolean, float64[:, ::1], int64, float64
)  # fmt: skip
def best_check(  # type: ignore[no-untyped-def]  # pragma: no cover
    weights, draft_sizes, is_chain, average, last, expected, has_drafted, step_ms, count, scale
):
    """`Forecast.best_check`."""
    num_nodes = step_ms.shape[1] - 1
    curves = np.empty((count, NUM_LEVELS, num_nodes + 1))
    _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted)
    larger = np.full(num_nodes + 1, np.inf)
    chosen, chosen_nodes, chosen_rate = count, 0, 0.0
    for size in range(count - 1, -1, -1):
        best, best_rate = 0, -1.0
        for node in range(num_nodes + 1):
            total = 0.0
            for level in range(NUM_LEVELS):
                total += curves[size, level, node]
            larger[node] = min(larger[node], 1 + scale * (total / NUM_LEVELS - 1))
            best_rate = max(best_rate, larger[node] / step_ms[size, node])
        while larger[best] / step_ms[size, best] < (1 - TIE) * best_rate:
            best += 1
        best_rate = larger[best] / step_ms[size, best]
        if chosen == count or best_rate > CHECK_MARGIN * chosen_rate:
            chosen, chosen_nodes, chosen_rate = size, best, best_rate
    return chosen, chosen_nodes, chosen_rate


@compiled(
    float32[:, :, :, ::1], float64[::1], boolean, float64, float64, float64, boolean, float64[:, ::1], int64, int64
)  # fmt: skip
def best_size(  # type: ignore[no-untyped-def]  # pragma: no cover
    weights, draft_sizes, is_chain, average, last, expected, has_drafted, step_ms, count, num_remaining
):
    """`Forecast.best_size`."""
    curves = np.empty((count, NUM_LEVELS, step_ms.shape[1]))
    _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted)
    return _best_rate(curves, step_ms, float64(num_remaining))
