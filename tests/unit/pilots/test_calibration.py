"""From scores to probabilities, and the fit."""

import numpy as np
import pytest

from blockpilot.core.candidates import Candidates
from blockpilot.pilots.calibration import (
    FEATURES,
    Calibration,
    expected_calibration_error,
    feature_rows,
    sigmoid,
)
from blockpilot.pilots.fitting import calibration_rows, fit_calibration
from tests.support import child_log_probs
from tests.unit.pilots.pieces import make_drafts, random_candidates, true_probabilities

TRUTH = np.array([[-0.4, 1.0], [-0.7, 0.9], [-1.0, 0.8], [-1.3, 0.7]])


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_without_a_fit_scores_are_taken_at_their_word(is_pairwise: bool) -> None:
    candidates = random_candidates(0, is_pairwise=is_pairwise)
    first, later = Calibration.identity().probabilities(candidates)
    np.testing.assert_allclose(first, np.exp(child_log_probs(candidates, 0, 0)), rtol=1e-4)
    for position in range(1, candidates.num_positions):
        for parent in range(candidates.width):
            expected = np.exp(child_log_probs(candidates, position, parent))
            np.testing.assert_allclose(later[position - 1, parent], expected, rtol=1e-4)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_probabilities_are_the_logistic_model_of_the_features(is_pairwise: bool) -> None:
    candidates = random_candidates(1, is_pairwise=is_pairwise)
    random = np.random.default_rng(2)
    weights = random.normal(size=(3, len(FEATURES))).astype(np.float32) * 0.3  # three rows serve seven depths
    weights[:, 0] -= 2
    first, later = Calibration(weights).probabilities(candidates, width=3)
    for position in range(candidates.num_positions):
        for parent in range(3 if position else 1):
            scores = child_log_probs(candidates, position, parent)[:3]
            rows = feature_rows(scores, candidates.log_probs[position, :3], np.array(parent))
            expected = sigmoid(rows @ weights[min(position, 2)])
            found = later[position - 1, parent] if position else first
            np.testing.assert_allclose(found, expected / max(expected.sum(), 1), rtol=2e-4)
            assert found.sum() <= 1 + 1e-6


def test_impossible_and_certain_scores_stay_finite() -> None:
    scores = np.array([[0.0, -400.0]], dtype=np.float32)
    first, _ = Calibration.identity().probabilities(Candidates(np.array([[1, 2]]), scores))
    assert first[0] > 0.999 and 0 <= first[1] < 1e-9


def test_fit_recovers_a_known_model() -> None:
    drafts, held_out = make_drafts(TRUTH, num_anchors=6000), make_drafts(TRUTH, num_anchors=3000, seed=1)
    fitted = fit_calibration([drafts])
    features, hits, depths = calibration_rows(held_out)
    told = sigmoid((features * fitted.weights[depths]).sum(axis=-1))
    first = held_out.log_probs[:, :1]
    assert expected_calibration_error(told, hits) < 0.012
    assert expected_calibration_error(np.exp(first).reshape(-1), hits[: first.size]) > 0.03
    true = true_probabilities(first, TRUTH[:1]).reshape(-1)
    assert np.abs(told[: len(true)] - true).mean() < 0.015


def test_rows_are_taken_only_where_the_parent_is_right() -> None:
    drafts = make_drafts(TRUTH, num_anchors=200)
    _, hits, depths = calibration_rows(drafts)
    alive = np.cumprod(drafts.true_ranks < 4, axis=1).sum(axis=0)
    counts = np.bincount(depths) // 4
    np.testing.assert_array_equal(counts, [200, *alive[:-1]])
    assert hits.sum() == alive.sum()


def test_calibration_error_of_known_frequencies() -> None:
    told = np.repeat(np.array([0.2, 0.8], dtype=np.float32), 500)
    hits = np.concatenate([np.arange(500) < 100, np.arange(500) < 300])
    assert expected_calibration_error(told, hits, num_bins=2) == pytest.approx(0.1, abs=1e-6)


def test_scores_that_parents_share_need_no_pairs() -> None:
    random = np.random.default_rng(3)
    marginals = -np.sort(random.exponential(size=(5, 4)).astype(np.float32) * 20)
    ids = np.zeros((5, 4), dtype=np.int64)
    pairs = np.repeat(marginals[1:, None], 4, axis=1)
    calibration = Calibration(random.normal(size=(3, 6)).astype(np.float32))
    plain = calibration.probabilities(Candidates(ids, marginals))
    paired = calibration.probabilities(Candidates(ids, marginals, marginals[0], pairs))
    np.testing.assert_array_equal(plain[0], paired[0])
    np.testing.assert_array_equal(plain[1], paired[1])
