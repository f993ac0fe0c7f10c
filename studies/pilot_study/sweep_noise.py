"""How much of an oracle's gain is the luck of the best of several draws.

The tables hold one run per sample and size, so noise has to be told from its shape. Over consecutive sizes b:

    log tau[i, b] = level[i] + mean[b] + smooth[i](b) + noise[i, b]

A sample's own preference is smooth, a polynomial in b of low degree; what is left is noise, independent between sizes,
with a deviation of its own per sample. Two things follow by simulation: what the oracle gains when all samples share
the mean curve (noise only), and what a predictor gains that knows every smooth curve and no noise (knowable).

A sharp preference for one size that is real would count as noise here, and noise that neighbouring sizes share counts
as a smooth curve. Higher degrees let more pass as real.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilot_study.intervals import Values

NUM_SIMULATIONS = 400


@dataclass(frozen=True)
class NoiseModel:
    level: Values  # [N]
    mean: Values  # [S]
    basis: Values  # [S, degree], the sample's own curve is a mix of these
    covariance: Values  # [degree, degree] of that mix, noise taken out
    deviation: Values  # [N], of the noise: right on average
    noise: float  # deviation of all noise together, as a share of tau


@dataclass(frozen=True)
class NoiseReport:
    """Gains over the trained size and over the best fixed one, as means of simulations."""

    noise: float
    noise_only: tuple[float, float]
    knowable: tuple[float, float]
    both: tuple[float, float]  # the model's own oracle: should be near the one observed


def fit_noise(tau: Values, sizes: NDArray[np.int64], degree: int) -> NoiseModel:
    """`tau` [N, S] at consecutive `sizes`; `degree` of the samples' own curves, at least 1."""
    logs = np.log(tau)
    mean = logs.mean(axis=0)
    basis = np.vander((sizes - sizes.mean()).astype(np.float64), degree + 1, increasing=True)  # [S, degree + 1]
    inverse = np.linalg.pinv(basis)
    mixes = (logs - mean) @ inverse.T  # [N, degree + 1]
    left = logs - mean - mixes @ basis.T
    freedom = len(sizes) - degree - 1
    variance = (left**2).sum(axis=1) / (freedom * (len(tau) - 1) / len(tau))  # the mean is estimated, too
    spread = np.cov(mixes.T) - variance.mean() * inverse @ inverse.T
    own = spread[1:, 1:]  # the constant is the level
    deviation = np.sqrt(variance) / root_bias(freedom)
    return NoiseModel(
        mixes[:, 0], mean, basis[:, 1:], _nearest_positive(own), deviation, float(np.sqrt(variance.mean()))
    )


def root_bias(freedom: int) -> float:
    """The mean of the root of an unbiased variance estimate of normal values, over the true deviation."""
    return math.sqrt(2 / freedom) * math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)


def simulate_gains(
    model: NoiseModel, candidates: NDArray[np.bool_], reference: int, *, num_simulations: int = NUM_SIMULATIONS
) -> NoiseReport:
    """Tables like the one observed. `candidates` [S] may be chosen; `reference` is the column of the trained size."""
    draw = np.random.default_rng(0)
    shape = (len(model.level), len(model.mean))
    common = model.level[:, None] + model.mean
    found = []
    for _ in range(num_simulations):
        noise = draw.normal(size=shape) * model.deviation[:, None]
        mixes = draw.multivariate_normal(np.zeros(len(model.covariance)), model.covariance, size=shape[0])
        curves = common + mixes @ model.basis.T
        tables = (common + noise, curves, curves + noise)
        found.append([oracle_gains(np.exp(table), candidates, reference) for table in tables])
    noise_only, knowable, both = np.array(found).mean(axis=0).tolist()
    return NoiseReport(model.noise, tuple(noise_only), tuple(knowable), tuple(both))


def oracle_gains(tau: Values, candidates: NDArray[np.bool_], reference: int) -> tuple[float, float]:
    """Of the best candidate per row of `tau` [N, S]: over the reference column, and over the best fixed candidate."""
    best, fixed = tau[:, candidates].max(axis=1).mean(), tau.mean(axis=0)
    return float(best / fixed[reference] - 1), float(best / fixed[candidates].max() - 1)


def _nearest_positive(matrix: Values) -> Values:
    """Without negative variances, which are only errors of estimation."""
    values, vectors = np.linalg.eigh(np.atleast_2d(matrix))
    positive: Values = (vectors * np.maximum(values, 0)) @ vectors.T
    return positive
