"""How much of an oracle's gain is the luck of the best of several draws.

The tables hold one run per sample and size, so noise has to be told from its shape. The model, over consecutive sizes b:

    log tau[i, b] = level[i] + mean[b] + smooth[i](b) + noise[i, b]

A sample's own preference is smooth, a polynomial in b of low degree; what is left is noise, independent between sizes,
with a deviation of its own per sample. Two things follow by simulation: what the oracle gains when all samples share the
mean curve (noise only), and what a predictor gains that knows every smooth curve and no noise (knowable).

A sharp preference for one size that is real would count as noise here, and noise that neighbouring sizes share counts as
a smooth curve. Higher degrees let more pass as real.
"""

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
    deviation: Values  # [N], of the noise

    @property
    def noise(self) -> float:
        """Deviation of all noise together, as a share of tau."""
        return float(np.sqrt((self.deviation**2).mean()))


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
    freedom = (len(sizes) - degree - 1) * (len(tau) - 1) / len(tau)
    deviation = np.sqrt((left**2).sum(axis=1) / freedom)
    spread = np.cov(mixes.T) - (deviation**2).mean() * inverse @ inverse.T
    own = spread[1:, 1:]  # the constant is the level
    return NoiseModel(mixes[:, 0], mean, basis[:, 1:], _nearest_positive(own), deviation)


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
        found.append(
            [_gains(table, by, candidates, reference) for table, by in ((common + noise,) * 2, (curves,) * 2)]
            + [_gains(curves + noise, curves + noise, candidates, reference)]
        )
    noise_only, knowable, both = np.array(found).mean(axis=0).tolist()
    return NoiseReport(model.noise, tuple(noise_only), tuple(knowable), tuple(both))


def _gains(logs: Values, by: Values, candidates: NDArray[np.bool_], reference: int) -> tuple[float, float]:
    """Of choosing per sample by `by` [N, S]: over the reference column, and over the best fixed candidate."""
    tau = np.exp(logs)
    chosen = np.where(candidates, by, -np.inf).argmax(axis=1)
    mean = tau[np.arange(len(tau)), chosen].mean()
    fixed = tau.mean(axis=0)
    return float(mean / fixed[reference] - 1), float(mean / fixed[candidates].max() - 1)


def _nearest_positive(matrix: Values) -> Values:
    """Without negative variances, which are only errors of estimation."""
    values, vectors = np.linalg.eigh(np.atleast_2d(matrix))
    positive: Values = (vectors * np.maximum(values, 0)) @ vectors.T
    return positive
