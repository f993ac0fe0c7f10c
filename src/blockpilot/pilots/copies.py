"""How likely a copy out of a request's own text is right, and what a check of it alone would bring.

Where an answer repeats its prompt, or itself, the words that stood there last are the best draft, and cost nothing. How
often that is so differs from request to request. A token of a copy is right, given all before it, by a logistic model
of how many tokens agree up to there, how often this request's copies have come true of late, and the temperature.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blockpilot.core.draft import MAX_MATCH, Copy, FloatArray, IntArray

MAX_COPIED = 24  # tokens that a copy offers
# Fitted to 5,787 copies in answers of the default target to training prompts of ten kinds, T = 0, 0.7 and 1.
WEIGHTS = (-0.65, 0.77, 0.31, -0.44)  # 1, log2(tokens that agree), logit(share that came true), temperature
AGREED = tuple(np.float32(weight) for weight in (0.90, 0.53, 0.63))  # 1, logit(by the text), logit(by the drafter)
LEAST_OWN = 0.005  # what the drafter thinks of a token that is not among its candidates
_PRIOR_RIGHT, _PRIOR_SEEN = 1.0, 3.0  # tokens of copies before the first
_LEAST, _MOST = 1e-3, 1 - 1e-3
_OF_MATCH = [0.0, *(WEIGHTS[1] * math.log2(count) for count in range(1, MAX_MATCH + 1))]  # by tokens that agree


class Copied(NamedTuple):
    """Candidates out of the text: a chain behind the anchor."""

    token_ids: IntArray  # [m]
    probabilities: FloatArray  # [m], of being right if all before are


NOTHING_COPIED = Copied(np.zeros(0, np.int64), np.zeros(0, np.float32))


class WeighedCopy(NamedTuple):
    """How likely the tokens of a copy are, each given all before it, and how many are checked best without a draft."""

    token_ids: Sequence[int]
    probabilities: Sequence[float]
    num_best: int
    rate: float  # tokens per millisecond of that check
    promised: float  # tokens, without the target's own

    def as_candidates(self) -> Copied:
        return Copied(np.array(self.token_ids, np.int64), np.array(self.probabilities, np.float32))


def weigh_copy(copy: Copy, temperature: float, check_ms: Sequence[float], most: int) -> WeighedCopy:
    """`check_ms[n]`: a check of the anchor and n tokens; at most `most` tokens are checked alone.

    In plain Python: calling compiled code takes longer than this, once per step."""
    num_right, num_wrong = copy.num_right + _PRIOR_RIGHT, copy.num_seen - copy.num_right + _PRIOR_SEEN - _PRIOR_RIGHT
    constant = WEIGHTS[0] + WEIGHTS[2] * math.log(num_right / num_wrong) + WEIGHTS[3] * temperature
    probabilities = [
        min(max(1 / (1 + math.exp(-constant - _OF_MATCH[min(agreed, MAX_MATCH)])), _LEAST), _MOST)
        for agreed in range(copy.num_matched, copy.num_matched + len(copy.token_ids))
    ]
    return WeighedCopy(copy.token_ids, probabilities, *best_prefix(probabilities, check_ms, most))


def best_prefix(probabilities: Sequence[float], check_ms: Sequence[float], most: int) -> tuple[int, float, float]:
    """How many tokens of a copy bring the most per millisecond: (how many, tokens per millisecond, promised)."""
    best, best_rate, best_promised = 0, 1 / check_ms[0], 0.0
    path, promised = 1.0, 0.0
    for count in range(1, min(len(probabilities), len(check_ms) - 1, most) + 1):
        path *= probabilities[count - 1]
        promised += path
        rate = (1 + promised) / check_ms[count]
        if rate > best_rate:
            best, best_rate, best_promised = count, rate, promised
    return best, best_rate, best_promised
