"""How likely a copy out of a request's own text is right, and what a check of it alone would bring.

Where an answer repeats its prompt, or itself, the words that stood there last are the best draft, and cost nothing. How
often that is so differs from request to request. A token of a copy is right, given all before it, by a logistic model
of how many tokens agree up to there, how often this request's copies have come true of late, and the temperature. Its
arithmetic is in `loops/copies.py`.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import MAX_MATCH, Copy, FloatArray, IntArray
from blockpilot.pilots.forecast import load_loops

MAX_COPIED = 24  # tokens that a copy offers
# Fitted to 5,787 copies in answers of the default target to training prompts of ten kinds, T = 0, 0.7 and 1.
WEIGHTS = (-0.65, 0.77, 0.31, -0.44)  # 1, log2(tokens that agree), logit(share that came true), temperature
AGREED = tuple(np.float32(weight) for weight in (0.90, 0.53, 0.63))  # 1, logit(by the text), logit(by the drafter)
LEAST_OWN = 0.005  # what the drafter thinks of a token that is not among its candidates
_PRIOR_RIGHT, _PRIOR_SEEN = 1.0, 3.0  # tokens of copies before the first
_LEAST, _MOST = 1e-3, 1 - 1e-3


class Copied(NamedTuple):
    """Candidates out of the text: a chain behind the anchor."""

    token_ids: IntArray  # [m]
    probabilities: FloatArray  # [m], of being right if all before are


NOTHING_COPIED = Copied(np.zeros(0, np.int64), np.zeros(0, np.float32))


def weigh_copy(copy: Copy | None, temperature: float) -> Copied:
    if copy is None:
        return NOTHING_COPIED
    num_right, num_wrong = copy.num_right + _PRIOR_RIGHT, copy.num_seen - copy.num_right + _PRIOR_SEEN - _PRIOR_RIGHT
    constant = WEIGHTS[0] + WEIGHTS[2] * math.log(num_right / num_wrong) + WEIGHTS[3] * temperature
    found = load_loops().weigh(constant, WEIGHTS[1], copy.num_matched, MAX_MATCH, len(copy.token_ids), _LEAST, _MOST)
    return Copied(np.array(copy.token_ids, np.int64), found)


def best_prefix(copied: Copied, check_ms: NDArray[np.float64]) -> tuple[int, float, float]:
    """How much of a copy is checked best if nothing else is: (tokens, tokens per millisecond, tokens promised).

    `check_ms[n]`: a check of the anchor and n tokens."""
    found: tuple[int, float, float] = load_loops().best_prefix(copied.probabilities, check_ms)
    return found
