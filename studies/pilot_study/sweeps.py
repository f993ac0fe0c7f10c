"""The BlockPilot paper's released tables: tau of one sample at several block sizes, one generation each.

tau is a ratio of whole numbers (emitted tokens / steps), so the length of the answer behind it can be told up to a
common factor. Greedy decoding is lossless on paper: the same sample should have the same answer at every size. Where no
choice of factors brings the lengths together, the sizes were measured on different answers.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from pilot_study.intervals import Values

WINDOW = (14, 15, 16, 17, 18)  # the candidates of the released predictor
TASKS = ("gsm8k", "math500")
MAX_TOKENS = 2048  # limit of the released runs


@dataclass(frozen=True)
class Sweep:
    """Rows are samples, columns block sizes."""

    sizes: tuple[int, ...]
    tau: Values  # [N, S]
    released: NDArray[np.int64]  # [N], block size that the released predictor chose
    tasks: tuple[str, ...]  # [N]

    def columns(self, sizes: tuple[int, ...]) -> Values:
        """tau [N, len(sizes)]."""
        return self.tau[:, [self.sizes.index(size) for size in sizes]]

    def at(self, chosen: NDArray[np.int64]) -> Values:
        """tau [N] at one size per sample."""
        places = [self.sizes.index(int(size)) for size in chosen]
        return self.tau[np.arange(len(self.tau)), places]

    def __len__(self) -> int:
        return len(self.tau)


def read_sweep(path: Path) -> Sweep:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        sizes = tuple(table["block_sizes"])
        tau = np.array([[sample["tau"][str(size)] for size in sizes] for sample in table["samples"]], dtype=np.float64)
        released = np.array([sample["released_choice"] for sample in table["samples"]], dtype=np.int64)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no table of a sweep: {error!r}") from error
    return Sweep(sizes, tau, released, (str(table["task"]),) * len(tau))


def join(sweeps: list[Sweep]) -> Sweep:
    if len({sweep.sizes for sweep in sweeps}) != 1:
        raise InputError("the tables hold different block sizes")
    return Sweep(
        sweeps[0].sizes,
        np.concatenate([sweep.tau for sweep in sweeps]),
        np.concatenate([sweep.released for sweep in sweeps]),
        tuple(task for sweep in sweeps for task in sweep.tasks),
    )


def best_sizes(sweep: Sweep, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """The size with the largest tau of every sample; the smaller where two are alike."""
    best: NDArray[np.int64] = np.array(sizes)[sweep.columns(sizes).argmax(axis=1)]
    return best


def count_ties(sweep: Sweep, sizes: tuple[int, ...]) -> int:
    """Samples whose best tau is reached by more than one size."""
    tau = sweep.columns(sizes)
    return int(((tau == tau.max(axis=1, keepdims=True)).sum(axis=1) > 1).sum())


def flat_shares(tau: Values, reference: Values, limits: tuple[float, ...] = (0.01, 0.02, 0.05)) -> dict[str, float]:
    """The share of rows whose best column of `tau` [N, S] beats `reference` [N] by less than each limit."""
    gains = tau.max(axis=1) / reference - 1
    return {f"below {limit:.0%}": round(float((gains < limit).mean()), 4) for limit in limits}


@dataclass(frozen=True)
class Lengths:
    """What the answers of one sample at several sizes can have in common at best."""

    tokens: tuple[int, ...]  # emitted at each size, with the factors that bring them closest together
    steps: tuple[int, ...]

    @property
    def spread(self) -> int:
        return max(self.tokens) - min(self.tokens)


def likeliest_lengths(tau: Values) -> Lengths:
    """Of one sample: tau [S] as fractions, each expanded so that the numbers of tokens lie closest together."""
    fractions = [Fraction(float(value)).limit_denominator(MAX_TOKENS) for value in tau]
    limit = MAX_TOKENS + max(WINDOW)
    multiples = [np.arange(1, max(limit // one.numerator, 1) + 1) * one.numerator for one in fractions]
    closest: list[int] = []
    for count in np.concatenate(multiples):
        near = [int(options[np.abs(options - count).argmin()]) for options in multiples]
        if not closest or max(near) - min(near) < max(closest) - min(closest):
            closest = near
    steps = (tokens // one.numerator * one.denominator for tokens, one in zip(closest, fractions, strict=True))
    return Lengths(tuple(closest), tuple(steps))
