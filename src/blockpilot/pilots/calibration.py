"""From a drafter's scores to the probability that the target agrees.

A drafter's softmax is no promise: most are too sure of themselves, more so deep in the block. The calibration is a
logistic model with weights of its own at every depth. Its features for child j after parent i, on a path that is right
so far:

    1, logit p(child | parent), log p(child) at its position alone, how far its parent's best child is ahead of it,
    log(1 + rank of the child), log(1 + rank of the parent)

where ranks are places among the candidates of a position. Without a fit the second weight is 1 and the others 0: the
scores are taken at their word.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.candidates import Candidates, FloatArray

FEATURES = ("one", "conditional", "marginal", "gap", "child_rank", "parent_rank")
MIN_LOG_PROB = -30.0
MAX_PROBABILITY = 1 - 1e-4  # of one score; a logit must stay finite
MAX_NEGATED = 60.0  # its exponential must stay finite, too
IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Calibration:
    weights: FloatArray  # [depths, features]; the last row serves all deeper positions
    _tables: dict[tuple[int, int], "_Table"] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def plain_weights(self) -> FloatArray:
        """In the form of `compiled/`."""
        return np.array(self.weights, dtype=np.float32, order="C")

    @classmethod
    def identity(cls) -> "Calibration":
        return cls(np.array([IDENTITY], dtype=np.float32))

    def probabilities(self, candidates: Candidates, width: int | None = None) -> tuple[FloatArray, FloatArray]:
        """P(right | parent right): of the anchor's children [K], and of every parent's at later positions [D-1, K, K].

        `width` keeps the first candidates of every position. Siblings exclude each other: their sum is at most 1.
        """
        depth, size = candidates.num_positions, min(candidates.width, width or candidates.width)
        if not depth:
            return np.zeros(size, np.float32), np.zeros((0, size, size), np.float32)
        table = self._tables.get((depth, size))
        if table is None:
            table = self._tables[depth, size] = _Table(self.weights, depth, size)
        marginals = np.maximum(candidates.log_probs[:, :size].T[:, :, None], MIN_LOG_PROB)  # [child, position, 1]
        scores = marginals  # the same after every parent
        if candidates.pairwise is not None and candidates.first is not None:
            scores = np.empty((size, depth, size), dtype=np.float32)  # [child, position, parent]
            scores[:, 0] = candidates.first[:size, None]
            scores[:, 1:] = candidates.pairwise[:, :size, :size].transpose(2, 0, 1)
            np.maximum(scores, MIN_LOG_PROB, out=scores)
        found = table.apply(scores, marginals).transpose(1, 2, 0)
        return found[0, 0], found[1:]


class _Table:
    """The weights laid out for one number of positions and candidates, all negated: see `sigmoid_of_negated`.

    Children lie along the first axis: numpy reduces over it several times faster than over a short last one.
    """

    def __init__(self, weights: FloatArray, depth: int, size: int) -> None:
        rows = -weights[np.minimum(np.arange(depth), len(weights) - 1)].T[:, :, None]  # [features, position, 1]
        ranks = np.log1p(np.arange(size, dtype=np.float32))
        parents = np.where(np.arange(depth)[:, None] > 0, ranks[None, :], 0)  # [position, parent]: the anchor is one
        self.offset = rows[0] + rows[4] * ranks[:, None, None] + rows[5] * parents  # [child, position, parent]
        self.conditional, self.marginal, self.gap = rows[1], rows[2], rows[3]
        self.has_marginal, self.has_gap = bool(rows[2].any()), bool(rows[3].any())

    def apply(self, scores: FloatArray, marginals: FloatArray) -> FloatArray:
        """Probabilities [child, position, parent]; the last axis of `scores` is 1 where parents share them."""
        negated = self.conditional * logit(scores) + self.offset
        if self.has_marginal:
            negated += self.marginal * marginals
        if self.has_gap:
            negated += self.gap * (scores.max(axis=0) - scores)
        found = sigmoid_of_negated(negated)
        found /= np.maximum(found.sum(axis=0), 1)
        return found


def feature_rows(scores: FloatArray, marginals: FloatArray, parent_ranks: NDArray[np.int64]) -> FloatArray:
    """Features [..., K, F] of the K children of one parent each: what `probabilities` computes, laid open for a fit.

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
    found: FloatArray = np.exp(log_probs)
    np.minimum(found, MAX_PROBABILITY, out=found)
    np.log1p(np.negative(found, out=found), out=found)
    return np.subtract(log_probs, found, out=found)


def sigmoid(logits: FloatArray) -> FloatArray:
    return sigmoid_of_negated(np.negative(logits))


def sigmoid_of_negated(values: FloatArray) -> FloatArray:
    """sigmoid(-values), written into them. Weights that are negated once save a pass over every array of logits."""
    np.minimum(values, MAX_NEGATED, out=values)
    np.exp(values, out=values)
    values += 1
    return np.reciprocal(values, out=values)


def expected_calibration_error(probabilities: FloatArray, hits: NDArray[np.bool_], num_bins: int = 15) -> float:
    """The mean gap between predicted and observed frequency over equally full bins."""
    order = np.argsort(probabilities, kind="stable")
    bins = [part for part in np.array_split(order, num_bins) if len(part)]
    gaps = [abs(float(probabilities[part].mean()) - float(hits[part].mean())) * len(part) for part in bins]
    return float(sum(gaps) / max(len(probabilities), 1))
