"""The loops of `pilots/forecast.py`."""

import numpy as np

from blockpilot.pilots.forecast import NUM_LEVELS
from blockpilot.pilots.loops.jit import compiled, helper

LEVEL_SHARES = np.array([0.5, 1.0, 1.5])  # without a fit: what poor, common and good drafts add, over the mean
MIN_MEAN = 1.01
SIZE_MARGIN = 1.03  # what a smaller draft must promise over a larger one: forecasts are noisy, larger drafts show more
CHECK_MARGIN = 1.01  # the same where the number of nodes is decided with it
TIE = 1e-9  # rates that are so near are equal, and fewer nodes are taken
TREE_EXPONENT, TREE_REACH = 0.8, 0.5  # a tree's nodes fall off more slowly than a chain's, and reach further


@helper
def _rounded(value):  # type: ignore[no-untyped-def]
    """As features were when the forecast was fitted."""
    return np.float64(np.float32(value))


@helper
def _write_fitted(curves, weights, average, last, expected, has_drafted):  # type: ignore[no-untyped-def]
    """By a fit: every node is right with a probability of its own, a logistic function of what is remembered."""
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
def _write_geometric(curves, mean, draft_sizes, is_chain):  # type: ignore[no-untyped-def]
    """Without one every position is as likely right; a tree's nodes fall off more slowly and reach further."""
    for level in range(NUM_LEVELS):
        share = 1 - 1 / max(1 + LEVEL_SHARES[level] * (mean - 1), MIN_MEAN)
        reach = share if is_chain else share**TREE_REACH
        total = 1.0
        for node in range(curves.shape[2]):
            if node:
                total += share ** (np.float64(node) if is_chain else node**TREE_EXPONENT)
            for size in range(curves.shape[0]):
                curves[size, level, node] = total
        for size in range(curves.shape[0]):
            limit = (1 - reach ** draft_sizes[size]) / (1 - reach)
            for node in range(1, curves.shape[2]):
                curves[size, level, node] = min(curves[size, level, node], limit)


@helper
def _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted):  # type: ignore[no-untyped-def]
    """Expected tokens [sizes, levels, nodes + 1]; `weights` [sizes, levels, features, nodes] may be empty: no fit."""
    if len(weights):
        _write_fitted(curves, weights, _rounded(average), _rounded(last), _rounded(expected), np.float64(has_drafted))
    else:
        _write_geometric(curves, (average + expected) / 2 if has_drafted else average, draft_sizes, is_chain)


@compiled("float64[:,:,::1](float32[:,:,:,::1], float64[::1], boolean, float64, float64, float64, boolean, int64)")
def expected_tokens(weights, draft_sizes, is_chain, average, last, expected, has_drafted, num_nodes):  # type: ignore[no-untyped-def]
    """Tokens a step emits [sizes, levels, nodes + 1] if so many nodes are checked, 0 first."""
    curves = np.empty((len(draft_sizes), NUM_LEVELS, num_nodes + 1))
    _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted)
    return curves


@compiled(
    "Tuple((int64, int64, float64))(float32[:,:,:,::1], float64[::1], boolean, float64, float64, float64, boolean, "
    "float64[:,::1], int64, float64)"
)
def best_check(weights, draft_sizes, is_chain, average, last, expected, has_drafted, step_ms, count, scale):  # type: ignore[no-untyped-def]
    """One of the first `count` draft sizes and a number of nodes, decided together, and their tokens per millisecond.

    Poor, common and good drafts mix. What is forecast, but for the target's own token, counts `scale` times. Of numbers
    of nodes that are equally good the smallest is taken, of draft sizes the largest unless a smaller one is clearly
    better.
    """
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
            larger[node] = min(larger[node], 1 + scale * (total / NUM_LEVELS - 1))  # a larger draft shows no less
            best_rate = max(best_rate, larger[node] / step_ms[size, node])
        while larger[best] / step_ms[size, best] < (1 - TIE) * best_rate:
            best += 1
        best_rate = larger[best] / step_ms[size, best]
        if chosen == count or best_rate > CHECK_MARGIN * chosen_rate:
            chosen, chosen_nodes, chosen_rate = size, best, best_rate
    return chosen, chosen_nodes, chosen_rate


@compiled(
    "Tuple((int64, float64, float64))(float32[:,:,:,::1], float64[::1], boolean, float64, float64, float64, boolean, "
    "float64[:,::1], int64, int64, float64)"
)
def best_size(  # type: ignore[no-untyped-def]
    weights, draft_sizes, is_chain, average, last, expected, has_drafted, step_ms, count, num_remaining, scale
):
    """One of the first `count` draft sizes, its tokens per millisecond, its tokens; over poor, common and good drafts.

    Each of them will be checked with the number of nodes that is best for it. What is forecast, but for the target's
    own token, counts `scale` times. None emits more than `num_remaining`.
    """
    curves = np.empty((count, NUM_LEVELS, step_ms.shape[1]))
    _write_curves(curves, weights, draft_sizes, is_chain, average, last, expected, has_drafted)
    chosen, chosen_rate, chosen_tokens = count, 0.0, 0.0
    for size in range(count - 1, -1, -1):
        tokens = ms = 0.0
        for level in range(NUM_LEVELS):
            best, best_rate = 0, -1.0
            for node in range(curves.shape[2]):
                value = min(1 + scale * (curves[size, level, node] - 1), np.float64(num_remaining))
                if size < count - 1:  # a larger draft shows what a smaller one does
                    value = min(value, curves[size + 1, level, node])
                curves[size, level, node] = value
                if value / step_ms[size, node] > best_rate:
                    best, best_rate = node, value / step_ms[size, node]
            tokens += curves[size, level, best]
            ms += step_ms[size, best]
        if chosen == count or tokens / ms > SIZE_MARGIN * chosen_rate:
            chosen, chosen_rate, chosen_tokens = size, tokens / ms, tokens / NUM_LEVELS
    return chosen, chosen_rate, chosen_tokens
