"""From a drafter's scores to the probability that the target agrees.

A drafter's softmax is no promise: most are too sure of themselves, more so deep in the block. The calibration is a
logistic model with weights of its own at every depth. Its features for child j after parent i, on a path that is right
so far:

    1, logit p(child | parent), log p(child) at its position alone, how far its parent's best child is ahead of it,
    log(1 + rank of the child), log(1 + rank of the parent)

where ranks are places among the candidates of a position. Without a fit the second weight is 1 and the others 0: the
scores are taken at their word.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import FloatArray

FEATURES = ("one", "conditional", "marginal", "gap", "child_rank", "parent_rank")
MIN_LOG_PROB = -30.0
MAX_PROBABILITY = 1 - 1e-4  # of one score; a logit must stay finite
MAX_NEGATED = 60.0  # its exponential must stay finite, too
IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Calibration:
    weights: FloatArray  # [depths, features]; the last row serves all deeper positions

    @cached_property
    def plain_weights(self) -> FloatArray:
        """As `loops` takes them."""
        return np.array(self.weights, dtype=np.float32, order="C")

    @classmethod
    def identity(cls) -> "Calibration":
        return cls(np.array([IDENTITY], dtype=np.float32))


@dataclass(frozen=True, eq=False)
class Calibrations:
    """One for greedy requests, one for those that sample: their scores include the Gumbel noise."""

    greedy: Calibration
    sampled: Calibration

    def of(self, temperature: float) -> Calibration:
        return self.sampled if temperature > 0 else self.greedy


def feature_rows(scores: FloatArray, marginals: FloatArray, parent_ranks: NDArray[np.int64]) -> FloatArray:
    """Features [..., K, F] of the K children of one parent each, for a fit: `loops/growth.py` weighs the same ones.

    `parent_ranks` [...] are 0 for the anchor.
    """
    scores = np.maximum(scores, MIN_LOG_PROB)
    ranks = np.log1p(np.arange(scores.shape[-1], dtype=np.float32))
    columns = (
        np.ones_like(scores),
        logit(scores),
        np.maximum(marginals, MIN_LOG_PROB),
        scores.max(axis=-1, keepdims=True) - scores,
        np.broadcast_to(ranks, scores.shape),
        np.broadcast_to(np.log1p(parent_ranks, dtype=np.float32)[..., None], scores.shape),
    )
    rows: FloatArray = np.stack(columns, axis=-1).astype(np.float32, copy=False)
    return rows


def logit(log_probs: FloatArray) -> FloatArray:
    """log(p / (1 - p)) of log p."""
    found: FloatArray = log_probs - np.log1p(-np.minimum(np.exp(log_probs), MAX_PROBABILITY))
    return found


def expected_calibration_error(probabilities: FloatArray, hits: NDArray[np.bool_], num_bins: int = 15) -> float:
    """The mean gap between predicted and observed frequency over equally full bins."""
    order = np.argsort(probabilities, kind="stable")
    bins = [part for part in np.array_split(order, num_bins) if len(part)]
    gaps = [abs(float(probabilities[part].mean()) - float(hits[part].mean())) * len(part) for part in bins]
    return float(sum(gaps) / max(len(probabilities), 1))
