"""What the next draft will bring, guessed before it is made from how the last ones went.

`Recent` is what a request remembers: how many tokens its steps emit when nothing cuts them short, how sure the drafter
was of its last draft, and how much of what its drafts promised came true. `Forecast` turns that into curves for every
draft size: the tokens a step emits if n nodes are checked. There are three, for drafts that turn out poor, common and
good, a third of them each: how many nodes are checked is decided after the draft, and that choice is worth something.
The n-th node is right with a probability of its own (on a chain that is the chance to survive to depth n), a logistic
function of what is remembered, fitted on traces. Without a fit a geometric law stands in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.candidates import FloatArray
from blockpilot.core.errors import InputError
from blockpilot.pilots import switch

Values = NDArray[np.float64]
FEATURES = ("one", "average", "last", "expected", "has_drafted")
HEAD = 3  # positions of a draft that speak for its confidence, whatever the draft size
DECAY = 0.75  # what a step leaves of the old average
MAX_AVERAGE = 32.0
TRUST_PRIOR = 4.0  # tokens promised and kept before the first step: so much is a drafter trusted at first
TRUST_DECAY = 0.95
MAX_TRUST = 1.5
LEVEL_SHARES = np.array([0.5, 1.0, 1.5])  # without a fit: what poor, common and good drafts add, over the mean
NUM_LEVELS = len(LEVEL_SHARES)
MIN_MEAN = 1.01
SIZE_MARGIN = 1.03  # what a smaller draft must promise over a larger one: forecasts are noisy, larger drafts show more
CHECK_MARGIN = 1.01  # the same where the number of nodes is decided with it
TIE = 1e-9  # rates that are so near are equal, and fewer nodes are taken
TREE_EXPONENT, TREE_REACH = 0.8, 0.5  # a tree's nodes fall off more slowly than a chain's, and reach further


@dataclass
class Recent:
    """A request's memory. All counts are of emitted tokens."""

    average: float = 2.5  # moving average; steps that were cut short count with what they would have gone on to emit
    last: float = 0.0  # of the last step that checked something
    expected: float = 0.0  # what the last draft promised
    has_drafted: bool = False
    promised: float = TRUST_PRIOR  # tokens that checked nodes were to bring, of late
    kept: float = TRUST_PRIOR  # and those they brought
    foretold: float = TRUST_PRIOR  # and those that were forecast before the drafts

    def features(self) -> FloatArray:
        return np.array([1, self.average, self.last, self.expected, self.has_drafted], dtype=np.float32)

    @property
    def trust(self) -> float:
        """What a promised token is worth in this request."""
        return min(self.kept / self.promised, MAX_TRUST)

    @property
    def scale(self) -> float:
        """What a token that was forecast is worth here: forecasts are fitted to single requests, all greedy."""
        return min(self.kept / self.foretold, MAX_TRUST)

    def record_drafts(self, drafts: Sequence[Sequence[float]], weight: float = 1.0) -> None:
        """Each: the probabilities that its likeliest chain is right up to the first positions, at most `HEAD`.

        A memory that n requests share takes the drafts and steps of each, in their order, with the weight 1/n.
        """
        more, trust, expected = self.average - 1, self.trust, self.expected
        for paths in drafts:
            promised = 1 + trust * (sum(paths) + (paths[-1] * more if paths else 0.0))
            expected = _toward(expected, promised, weight) if self.has_drafted else promised
            self.has_drafted = True
        self.expected = expected

    def record_steps(
        self, steps: Sequence[tuple[int, int, float]], weight: float = 1.0, foretold: float | None = None
    ) -> None:
        """Drafted steps: tokens emitted, depth of the nodes checked (0 if none was worth it), tokens these promised.

        `foretold`: what the forecast that chose how many nodes to check wanted of each; None: there was none.

        Had a path that was right to its end gone on, it would have gone on for `average` tokens: acceptance is taken to
        have no memory. So the average does not depend on how deep the pilot dared to look.
        """
        average, last, sum_promised, kept = self.average, self.last, self.promised, self.kept
        new = weight * (1 - DECAY)
        for emitted, depth, promised in steps:
            value = self.expected
            if depth:
                last = _toward(last, float(emitted), weight) if last else float(emitted)
                value = emitted + (average - 1 if emitted > depth else 0)
                sum_promised += weight * (promised - (1 - TRUST_DECAY) * (sum_promised - TRUST_PRIOR))
                kept += weight * (emitted - 1 - (1 - TRUST_DECAY) * (kept - TRUST_PRIOR))
                if foretold is not None:
                    self.foretold += weight * (foretold - (1 - TRUST_DECAY) * (self.foretold - TRUST_PRIOR))
            average = (1 - new) * average + new * min(value, MAX_AVERAGE)
        self.average, self.last, self.promised, self.kept = average, last, sum_promised, kept


def _toward(old: float, new: float, weight: float) -> float:
    return new if weight == 1 else old + weight * (new - old)


@dataclass(frozen=True, eq=False)
class Forecast:
    draft_sizes: tuple[int, ...]
    is_chain: bool = False
    num_nodes: int = 63
    weights: FloatArray | None = None  # [sizes, levels, nodes, features]

    def __post_init__(self) -> None:
        wanted = (len(self.draft_sizes), NUM_LEVELS, self.num_nodes, len(FEATURES))
        if self.weights is not None and self.weights.shape != wanted:
            raise InputError(f"the forecast's weights have the shape {self.weights.shape}, and {wanted} is needed")

    def best_size(self, recent: Recent, step_ms: Values, count: int, num_remaining: int) -> tuple[int, float]:
        """Which of the first `count` draft sizes to choose, and its expected tokens per millisecond.

        `step_ms` [sizes, nodes + 1] are what steps cost. None emits more than `num_remaining` tokens.
        """
        compiled = switch.load_compiled()
        if compiled is not None:
            remembered = recent.average, recent.last, recent.expected, recent.has_drafted
            found: tuple[int, float] = compiled.best_size(
                *self._arrays, self.is_chain, *remembered, step_ms, count, num_remaining
            )
            return found
        rates = self.rates(recent, step_ms[:count], num_remaining)
        best = count - 1
        for smaller in range(best - 1, -1, -1):
            best = smaller if rates[smaller] > SIZE_MARGIN * rates[best] else best
        return best, rates[best]

    def best_check(self, recent: Recent, step_ms: Values, count: int, scale: float = 1.0) -> tuple[int, int, float]:
        """One draft size and number of nodes for many requests of one kind: (size, nodes, tokens per millisecond).

        Tokens of the forecast, but for the target's own, count `scale` times.
        """
        compiled = switch.load_compiled()
        if compiled is not None:
            remembered = recent.average, recent.last, recent.expected, recent.has_drafted
            found: tuple[int, int, float] = compiled.best_check(
                *self._arrays, self.is_chain, *remembered, step_ms, count, scale
            )
            return found
        expected = self.expected(recent)[:count].mean(axis=1)  # [sizes, nodes + 1]: poor, common and good drafts mix
        for size in range(count - 1, 0, -1):
            np.minimum(expected[size - 1], expected[size], out=expected[size - 1])
        rates = (1 + scale * (expected - 1)) / step_ms[:count]
        nodes = (rates >= (1 - TIE) * rates.max(axis=1, keepdims=True)).argmax(axis=1)
        best = count - 1
        for smaller in range(best - 1, -1, -1):
            is_better = rates[smaller, nodes[smaller]] > CHECK_MARGIN * rates[best, nodes[best]]
            best = smaller if is_better else best
        return best, int(nodes[best]), float(rates[best, nodes[best]])

    def rates(self, recent: Recent, step_ms: Values, num_remaining: int) -> list[float]:
        """Expected tokens per millisecond of the smallest draft sizes, over poor, common and good drafts."""
        expected = np.minimum(self.expected(recent)[: len(step_ms)], num_remaining)  # [sizes, levels, nodes + 1]
        for size in range(len(step_ms) - 1, 0, -1):  # a larger draft shows what a smaller one does
            np.minimum(expected[size - 1], expected[size], out=expected[size - 1])
        best = (expected / step_ms[:, None]).argmax(axis=-1)  # [sizes, levels], nodes that will be checked
        tokens = np.take_along_axis(expected, best[..., None], axis=-1)[..., 0].sum(axis=-1)
        rates: list[float] = (tokens / np.take_along_axis(step_ms, best, axis=-1).sum(axis=-1)).tolist()
        return rates

    def expected(self, recent: Recent) -> Values:
        """Tokens a step emits [sizes, levels, nodes + 1] if so many nodes are checked, 0 first."""
        if self.weights is not None:
            surplus = np.tanh(self._half_weights.dot(recent.features())).reshape(self._shape)
            surplus *= 0.5  # what a node's probability is above 1/2
            return np.add.accumulate(surplus, axis=-1) + self._ramp
        mean = (recent.average + recent.expected) / 2 if recent.has_drafted else recent.average
        means = np.maximum(1 + LEVEL_SHARES * (mean - 1), MIN_MEAN)
        return self._geometric(1 - 1 / means)

    def _geometric(self, shares: Values) -> Values:
        """Every position is right with probability `share`; a tree's nodes fall off more slowly and reach further."""
        curves = np.ones(self._shape)
        curves[..., 1:] += np.add.accumulate(shares[:, None] ** self._exponents, axis=-1)
        reach = shares if self.is_chain else shares**TREE_REACH  # [levels]
        limits = (1 - reach ** np.array(self.draft_sizes)[:, None]) / (1 - reach)  # [sizes, levels]
        return np.minimum(curves, limits[..., None], out=curves)

    @cached_property
    def _arrays(self) -> tuple[FloatArray, Values]:
        """Weights and draft sizes in the form of `compiled/`."""
        weights = np.zeros((0, 0, 0, 0)) if self.weights is None else self.weights
        swapped = np.array(weights.swapaxes(2, 3), dtype=np.float32, order="C")  # [sizes, levels, features, nodes]
        return swapped, np.array(self.draft_sizes, dtype=np.float64)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.draft_sizes), NUM_LEVELS, self.num_nodes + 1

    @cached_property
    def _half_weights(self) -> Values:
        """[sizes * levels * (nodes + 1), features], with zeros for no node. sigmoid(x) = 1/2 + tanh(x / 2) / 2."""
        assert self.weights is not None
        padded = np.pad(self.weights.astype(np.float64), ((0, 0), (0, 0), (1, 0), (0, 0)))
        return padded.reshape(-1, len(FEATURES)) / 2

    @cached_property
    def _ramp(self) -> Values:
        """What n nodes bring if each is right with probability 1/2; the target's own token comes on top."""
        return 1 + np.arange(self.num_nodes + 1) / 2

    @cached_property
    def _exponents(self) -> Values:
        ranks = np.arange(1.0, self.num_nodes + 1)
        exponents: Values = ranks if self.is_chain else ranks**TREE_EXPONENT
        return exponents
