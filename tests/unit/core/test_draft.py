import numpy as np
import pytest

from blockpilot.core.draft import Draft, HostDraft, node_probabilities
from blockpilot.core.tree import DraftTree

TOKEN_IDS = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int64)
LOG_PROBS = np.log(np.array([[0.6, 0.3], [0.5, 0.2], [0.4, 0.1]], dtype=np.float32))


def random_draft(*, is_pairwise: bool) -> HostDraft:
    scores = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
    ids = np.arange(12, dtype=np.int64).reshape(4, 3)
    return Draft(ids, scores[:, 0], scores[0, 1], scores[1:]) if is_pairwise else Draft(ids, scores[:, 0])


def test_shape() -> None:
    draft = Draft(TOKEN_IDS, LOG_PROBS)
    assert (draft.num_positions, draft.width) == (3, 2)
    several = draft.map(lambda part: np.stack([part] * 5))  # of requests, with a leading axis
    assert (several.num_positions, several.width) == (3, 2)


def test_no_positions() -> None:
    empty = Draft(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert (empty.num_positions, empty.width) == (0, 1)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_every_array_is_mapped(is_pairwise: bool) -> None:
    draft = random_draft(is_pairwise=is_pairwise)
    for ours, theirs in zip(draft.map(lambda part: part + 1).arrays, draft.arrays, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            np.testing.assert_array_equal(ours, theirs + 1)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_a_cut_is_as_deep_and_wide_as_asked_for(is_pairwise: bool) -> None:
    draft = random_draft(is_pairwise=is_pairwise)
    short = draft.cut(2, 2)
    np.testing.assert_array_equal(short.token_ids, draft.token_ids[:2, :2])
    np.testing.assert_array_equal(short.log_probs, draft.log_probs[:2, :2])
    if draft.first is None or draft.pairwise is None:
        assert short.first is None and short.pairwise is None
    else:
        np.testing.assert_array_equal(short.first, draft.first[:2])
        np.testing.assert_array_equal(short.pairwise, draft.pairwise[:1, :2, :2])


def test_a_chain_keeps_all_candidates_where_pairs_rank_them() -> None:
    assert random_draft(is_pairwise=True).cut(3, 1).width == 3
    assert random_draft(is_pairwise=False).cut(3, 1).width == 1


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_probabilities_of_nodes_are_those_after_their_parents(is_pairwise: bool) -> None:
    pairs = np.log(np.array([[[0.7, 0.1], [0.2, 0.3]], [[0.4, 0.5], [0.6, 0.9]]], dtype=np.float32))
    first = np.log(np.array([0.8, 0.15], dtype=np.float32))
    draft = Draft(TOKEN_IDS, LOG_PROBS, first, pairs) if is_pairwise else Draft(TOKEN_IDS, LOG_PROBS)
    tree = DraftTree.build(9, [(0, 1), (0, 2), (2, 3), (3, 6), (1, 99), (5, 5)])
    expected = [0.8, 0.15, 0.2, 0.5] if is_pairwise else [0.6, 0.3, 0.5, 0.1]
    found = node_probabilities(draft, tree)
    np.testing.assert_allclose(np.array(found[1:5], dtype=float), expected, rtol=1e-6)
    assert found[0] is None and found[5] is None  # the anchor, and a token that was not proposed
    assert (found[6] is None) == is_pairwise  # after such a token pairs say nothing


def test_probabilities_of_a_grown_tree_follow_its_paths() -> None:
    grown = DraftTree.build(9, [(0, 4), (0, 5), (1, 5), (2, 4)])
    log_probs = np.log(np.array([0.9, 0.05, 0.3, 0.7], dtype=np.float32))
    draft = Draft(np.array([[4], [5]]), log_probs[:2, None], tree=grown, node_log_probs=log_probs)
    found = node_probabilities(draft, DraftTree.build(9, [(0, 5), (1, 4), (2, 7)]))
    np.testing.assert_allclose(np.array(found[1:3], dtype=float), [0.05, 0.7], rtol=1e-6)
    assert found[0] is None and found[3] is None
