"""The loops of `pilots/copies.py`."""

import numpy as np

from blockpilot.pilots.loops.jit import compiled


@compiled("float32[::1](float64, float64, int64, int64, int64, float64, float64)")
def weigh(constant, slope, num_matched, most_matched, count, least, most):  # type: ignore[no-untyped-def]
    """P(right | all before it right) of so many tokens of a copy; each agrees with one more than the one before."""
    found = np.empty(count, np.float32)
    for place in range(count):
        agreed = min(num_matched + place, most_matched)
        found[place] = min(max(1 / (1 + np.exp(-constant - slope * np.log2(agreed))), least), most)
    return found


@compiled("Tuple((int64, float64, float64))(float32[::1], float64[::1])")
def best_prefix(probabilities, check_ms):  # type: ignore[no-untyped-def]
    """How many tokens of a copy bring the most per millisecond: (how many, tokens per millisecond, promised).

    `check_ms[n]` is a check of the anchor and n tokens."""
    best, best_rate, best_promised = 0, 1 / check_ms[0], 0.0
    path, promised = 1.0, 0.0
    for count in range(1, min(len(probabilities) + 1, len(check_ms))):
        path *= probabilities[count - 1]
        promised += path
        if (1 + promised) / check_ms[count] > best_rate:
            best, best_rate, best_promised = count, (1 + promised) / check_ms[count], promised
    return best, best_rate, best_promised
