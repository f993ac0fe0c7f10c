"""From scores to probabilities, and the fit."""

import numpy as np
import pytest

from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.calibration import (
    FEATURES,
    Calibration,
    Calibrations,
    expected_calibration_error,
    feature_rows,
)
from blockpilot.pilots.fitting import calibration_rows, fit_calibration
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_nodes
from tests.support import child_log_probs, paths_of
from tests.unit.pilots.pieces import make_drafts, random_draft, true_probabilities

TRUTH = np.array([[-0.4, 1.0], [-0.7, 0.9], [-1.0, 0.8], [-1.3, 0.7]])


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def probabilities(draft: HostDraft, calibration: Calibration, width: int) -> dict[tuple[int, ...], float]:
    """P(right | parent right) by the ranks from depth 1 to a node, of every node: trees of all that there is."""
    ranks: HostDraft = Draft(np.broadcast_to(np.arange(draft.width), draft.token_ids.shape), *draft.arrays[1:])
    nodes = grow_nodes(ranks, GrowthRules(falling_costs(2000), draft.num_positions, calibration, width=width))
    tree = DraftTree.build(9, list(zip(nodes.parents, nodes.token_ids, strict=True)))
    found = dict(zip(paths_of(tree), nodes.paths, strict=True))
    return {path: value / (found[path[:-1]] if path[1:] else 1) for path, value in found.items()}


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_without_a_fit_scores_are_taken_at_their_word(is_pairwise: bool) -> None:
    draft = random_draft(0, depth=4, is_pairwise=is_pairwise)
    found = probabilities(draft, Calibration.identity(), width=4)
    assert len(found) == 4 + 16 + 64 + 256
    for path, value in found.items():
        score = child_log_probs(draft, len(path) - 1, path[-2] if path[1:] else 0)[path[-1]]
        assert value == pytest.approx(float(np.exp(score)), rel=1e-4)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_probabilities_are_the_logistic_model_of_the_features(is_pairwise: bool) -> None:
    """As they are fitted: the loops weigh the features that `feature_rows` writes."""
    draft = random_draft(1, depth=5, is_pairwise=is_pairwise)
    random = np.random.default_rng(2)
    weights = random.normal(size=(3, len(FEATURES))).astype(np.float32) * 0.3  # three rows serve five depths
    weights[:, 0] += np.array([-2, 0, 1])  # siblings that promise less than 1, and more
    found = probabilities(draft, Calibration(weights), width=3)
    assert len(found) == 3 + 9 + 27 + 81 + 243
    for path, value in found.items():
        position, parent = len(path) - 1, path[-2] if path[1:] else 0
        scores = child_log_probs(draft, position, parent)[:3]
        rows = feature_rows(scores, draft.log_probs[position, :3], np.array(parent))
        expected = sigmoid(rows @ weights[min(position, 2)])
        assert value == pytest.approx(float((expected / max(expected.sum(), 1))[path[-1]]), rel=2e-4)


def test_impossible_and_certain_scores_stay_finite() -> None:
    draft: HostDraft = Draft(np.array([[0, 1]]), np.array([[0.0, -400.0]], dtype=np.float32))
    found = probabilities(draft, Calibration.identity(), width=2)
    assert found[0,] > 0.999 and 0 <= found[1,] < 1e-9


def test_sampled_requests_have_a_calibration_of_their_own() -> None:
    greedy, sampled = Calibration.identity(), Calibration.identity()
    both = Calibrations(greedy, sampled)
    assert both.of(0.0) is greedy and both.of(0.7) is sampled


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
    plain: HostDraft = Draft(ids, marginals)
    paired: HostDraft = Draft(ids, marginals, marginals[0], pairs)
    rules = GrowthRules(falling_costs(200), 5, calibration)
    assert grow_nodes(plain, rules) == grow_nodes(paired, rules)
