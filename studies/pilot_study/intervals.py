"""Paired bootstrap over prompts: every column is resampled with the same rows, within each task."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
NUM_RESAMPLES = 2000
SEED = 20261115  # of the bootstrap alone


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float  # 2.5 %
    high: float  # 97.5 %

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which knows no NaN."""
        return {name: round(number, 6) if math.isfinite(number) else None for name, number in asdict(self).items()}


def show(number: Mapping[str, float | None] | None, spec: str = "+.1%") -> str:
    """A stored estimate as text: value [low, high]."""
    if number is None or None in number.values():
        return "-"
    value, low, high = (number[key] for key in ("value", "low", "high"))
    return f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"


class Bootstrap:
    def __init__(self, tasks: Sequence[str], num_resamples: int = NUM_RESAMPLES) -> None:
        """`tasks` [N] names the task of every prompt."""
        draw = np.random.default_rng(SEED)
        names = np.array(tasks)
        self.rows = np.empty((num_resamples, len(names)), dtype=np.int64)  # [R, N]
        for task in sorted(set(tasks)):
            places = np.flatnonzero(names == task)
            self.rows[:, places] = draw.choice(places, (num_resamples, len(places)))

    def estimate(self, formula: Callable[..., Values], *columns: Values) -> Estimate:
        """A formula of the columns' means, with its 95 % interval. NaN where it is not defined."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(formula(*(np.float64(column.mean()) for column in columns)))
            draws = formula(*(column[self.rows].mean(axis=1) for column in columns))
        finite = draws[np.isfinite(draws)]
        low, high = np.quantile(finite, (0.025, 0.975)).tolist() if len(finite) else (float("nan"),) * 2
        return Estimate(value, low, high)

    def mean(self, ours: Values) -> Estimate:
        return self.estimate(lambda a: a, ours)

    def gain(self, ours: Values, base: Values) -> Estimate:
        """How much larger our mean is, as a share of the other."""
        return self.estimate(lambda a, b: a / b - 1, ours, base)

    def captured(self, ours: Values, base: Values, best: Values) -> Estimate:
        """The share of what `best` has over `base` that is ours."""
        return self.estimate(lambda a, b, c: (a - b) / (c - b), ours, base, best)
