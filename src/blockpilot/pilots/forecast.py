"""What the next draft will bring, guessed before it is made from how the last ones went.

`Forecast` turns what is remembered (`Recent`) into curves for every draft size: the tokens a step emits if n nodes are
checked. There are three, for drafts that turn out poor, common and good, a third of them each: how many nodes are
checked may be decided after the draft, and that choice is worth something. The n-th node is right with a probability of
its own (on a chain that is the chance to survive to depth n), a logistic function of what is remembered, fitted on
traces. Without a fit a geometric law stands in. The arithmetic is in `loops/forecast.py`.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import FloatArray
from blockpilot.core.errors import InputError
from blockpilot.pilots.memory import Recent

Values = NDArray[np.float64]
FEATURES = ("one", "average", "last", "expected", "has_drafted")
HEAD = 3  # positions of a draft that speak for its confidence, whatever the draft size
NUM_LEVELS = 3  # poor, common and good drafts


def features(recent: Recent) -> FloatArray:
    return np.array([1, recent.average, recent.last, recent.expected, recent.has_drafted], dtype=np.float32)


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

    def best_size(
        self, recent: Recent, step_ms: Values, count: int, num_remaining: int, scale: float = 1.0
    ) -> tuple[int, float, float]:
        """Which of the first `count` draft sizes to choose: (size, tokens per millisecond, tokens).

        `step_ms` [sizes, nodes + 1] are what steps cost. Tokens of the forecast, but for the target's own, count
        `scale` times, and none emits more than `num_remaining`.
        """
        given = *self._given(recent), step_ms, count, num_remaining, scale
        found: tuple[int, float, float] = load_loops().best_size(*given)
        return found

    def best_check(self, recent: Recent, step_ms: Values, count: int, scale: float = 1.0) -> tuple[int, int, float]:
        """A draft size and a number of nodes, decided together: (size, nodes, tokens per millisecond).

        Tokens of the forecast, but for the target's own, count `scale` times.
        """
        found: tuple[int, int, float] = load_loops().best_check(*self._given(recent), step_ms, count, scale)
        return found

    def expected(self, recent: Recent) -> Values:
        """Tokens a step emits [sizes, levels, nodes + 1] if so many nodes are checked, 0 first."""
        found: Values = load_loops().expected_tokens(*self._given(recent), self.num_nodes)
        return found

    def _given(self, recent: Recent) -> tuple[FloatArray, Values, bool, float, float, float, bool]:
        remembered = recent.average, recent.last, recent.expected, recent.has_drafted
        return *self._arrays, self.is_chain, *remembered

    @cached_property
    def _arrays(self) -> tuple[FloatArray, Values]:
        """Weights and draft sizes as `loops` takes them."""
        weights = np.zeros((0, 0, 0, 0)) if self.weights is None else self.weights
        swapped = np.array(weights.swapaxes(2, 3), dtype=np.float32, order="C")  # [sizes, levels, features, nodes]
        return swapped, np.array(self.draft_sizes, dtype=np.float64)


@cache
def load_loops() -> ModuleType:
    """The arithmetic, compiled where it can be. The first call takes a moment, so pilots make it when they are made."""
    return import_module("blockpilot.pilots.loops")
