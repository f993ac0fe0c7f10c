"""What a request remembers, and what it expects of its next draft."""

import numpy as np
import pytest

from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.fitting import fit_forecast, walk
from blockpilot.pilots.forecast import FEATURES, Forecast, features
from blockpilot.pilots.memory import Recent
from tests.unit.pilots.pieces import make_drafts


def test_cut_steps_count_with_what_they_would_have_gone_on_to_emit() -> None:
    random = np.random.default_rng(0)
    averages = {}
    for depth in (3, 15):
        recent, seen = Recent(), []
        for _ in range(4000):
            accepted = random.geometric(0.25) - 1  # 4 tokens per step if nothing cuts
            recent.record_steps([(1 + min(accepted, depth), depth, 3.0)])
            seen.append(recent.average)
        averages[depth] = np.mean(seen[100:])
    assert averages[3] == pytest.approx(4, rel=0.08) and averages[15] == pytest.approx(4, rel=0.08)


def test_promises_that_are_not_kept_lose_their_worth() -> None:
    liar, honest = Recent(), Recent()
    for _ in range(30):
        liar.record_steps([(1, 3, 2.0)])
        honest.record_steps([(3, 3, 2.0)])
    assert liar.trust < 0.15 and honest.trust == pytest.approx(1)
    liar.record_drafts([[1.0, 1.0, 1.0]])
    assert liar.expected < 1.5


def test_a_draft_not_worth_checking_counts_as_it_promised() -> None:
    recent = Recent(average=4.0)
    recent.record_drafts([[0.1, 0.01, 0.001]])
    assert recent.expected == pytest.approx(1.111 + 0.003)
    recent.record_steps([(1, 0, 0.0)])
    assert recent.average == pytest.approx(3 + recent.expected / 4) and recent.last == 0


@pytest.mark.parametrize("is_chain", [False, True])
def test_without_a_fit_more_nodes_and_better_times_bring_more(is_chain: bool) -> None:
    forecast = Forecast((4, 8, 16), is_chain)
    poor, good = forecast.expected(Recent(average=1.5)), forecast.expected(Recent(average=6.0))
    assert good.shape == (3, 3, 64) and (good[..., 0] == 1).all()
    assert (np.diff(good, axis=-1) >= 0).all() and (good[..., 1:] > poor[..., 1:]).all()
    assert (np.diff(good, axis=0) >= 0).all() and good[0].max() <= 4 and good[2].max() <= 16
    assert (np.diff(good[..., 1:], axis=1) > 0).all(), "good drafts bring more than poor ones"


@pytest.mark.parametrize("is_chain", [False, True])
def test_fit_tells_what_steps_bring_on_average(is_chain: bool) -> None:
    truth = np.array([[0.5, 1.0]] * 7)
    drafts = {size: make_drafts(truth[: size - 1], num_anchors=800, depth=size - 1) for size in (4, 8)}
    calibration = Calibration.identity()
    forecast = fit_forecast(drafts, calibration, is_chain=is_chain, num_nodes=12, num_walks=1)
    assert forecast.draft_sizes == (4, 8) and forecast.weights is not None
    for index, size in enumerate((4, 8)):
        steps = walk(drafts[size], calibration, is_chain=is_chain, num_nodes=12)
        told = np.mean([forecast.expected(Recent(*row[1:].tolist()))[index] for row in steps.features], axis=0)
        seen = 1 + np.concatenate([[0], steps.hits.mean(axis=0).cumsum()])
        np.testing.assert_allclose(told.mean(axis=0), seen, rtol=0.06)
        assert (told[0, 1:] < told[2, 1:]).all()


def test_fit_uses_what_is_remembered() -> None:
    """Answers are easy or hard as a whole: the forecast after good steps lies above the one after bad ones."""
    easy, hard = (make_drafts(np.array([[offset, 1.0]] * 3), num_anchors=600, depth=3) for offset in (0.0, -4.0))
    joined = {name: np.concatenate([getattr(easy, name), getattr(hard, name)]) for name in ("log_probs", "true_ranks")}
    drafts = type(easy)(**joined, starts=range(0, 1200, 50))
    forecast = fit_forecast({4: drafts}, Calibration.identity(), is_chain=True, num_nodes=3)
    after = [
        forecast.expected(Recent(average=a, last=a, expected=2.0, has_drafted=True))[0, :, -1].mean()
        for a in (1.2, 4.0)
    ]
    assert after[1] > after[0] + 0.3


def test_curves_add_up_the_probabilities_of_nodes() -> None:
    random = np.random.default_rng(0)
    weights = random.normal(size=(2, 3, 7, 5)).astype(np.float32)
    recent = Recent(average=3.0, last=2.0, expected=2.5, has_drafted=True)
    assert features(recent).tolist() == [1, 3, 2, 2.5, 1] and len(FEATURES) == 5
    probabilities = 1 / (1 + np.exp(-(weights.astype(np.float64) @ features(recent))))
    found = Forecast((4, 8), num_nodes=7, weights=weights).expected(recent)
    np.testing.assert_allclose(found[..., 1:], 1 + probabilities.cumsum(axis=-1), rtol=1e-12)
    assert (found[..., 0] == 1).all()


def test_forecasts_are_worth_what_they_have_brought() -> None:
    good, poor, alone = Recent(), Recent(), Recent()
    assert good.scale == 1
    for _ in range(100):
        good.record_steps([(4, 6, 3.0)] * 4, 1 / 4, foretold=3.0)
        poor.record_steps([(2, 6, 3.0)] * 4, 1 / 4, foretold=3.0)
        alone.record_steps([(2, 6, 3.0)])
    assert good.scale == pytest.approx(1, abs=0.02) and poor.scale == pytest.approx(1 / 3, abs=0.05)
    assert poor.trust == pytest.approx(alone.trust, abs=0.05)  # what drafts promised themselves is another thing
    forecast, step_ms = Forecast((4, 8, 16)), 1 + np.full((3, 64), 0.02).cumsum(axis=-1)
    taken = [forecast.best_check(Recent(average=4.0), step_ms, 3, scale) for scale in (1.0, 0.6, 0.3)]
    assert taken[0][1] > taken[1][1] > taken[2][1] and taken[0][2] > taken[1][2] > taken[2][2]
