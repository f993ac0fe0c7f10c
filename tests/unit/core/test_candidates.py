import numpy as np
import pytest

from blockpilot.core.candidates import Candidates
from tests.support import child_log_probs

TOKEN_IDS = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int64)
LOG_PROBS = np.log(np.array([[0.6, 0.3], [0.5, 0.2], [0.4, 0.1]], dtype=np.float32))


def test_shape():
    candidates = Candidates(TOKEN_IDS, LOG_PROBS)
    assert (candidates.num_positions, candidates.width) == (3, 2)


def test_no_positions():
    empty = Candidates(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert (empty.num_positions, empty.width) == (0, 1)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_best_children_have_the_best_scores(is_pairwise: bool) -> None:
    random = np.random.default_rng(0)
    scores = random.normal(size=(4, 3, 3)).astype(np.float32)
    pairs = {"first": scores[0, 0], "pairwise": scores[1:]} if is_pairwise else {}
    candidates = Candidates(np.zeros((4, 3), dtype=np.int64), scores[:, 0], **pairs)
    best = candidates.best_children()
    assert len(best) == 4
    for position in range(4):
        for parent in range(3 if position else 1):
            assert best[position][parent] == int(child_log_probs(candidates, position, parent).argmax())


def test_arrays_that_compiled_code_can_read() -> None:
    ids, scores = np.zeros((3, 4), dtype=np.int64), np.zeros((3, 4), dtype=np.float32)
    first, pairwise = np.zeros(4, dtype=np.float32), np.zeros((2, 4, 4), dtype=np.float32)
    assert Candidates(ids, scores).is_plain and Candidates(ids, scores, first, pairwise).is_plain
    assert Candidates(ids[:2], scores[:2], first, pairwise[:1]).is_plain
    assert not Candidates(ids[:, :2], scores[:, :2]).is_plain
    assert not Candidates(ids.astype(np.int32), scores).is_plain
    assert not Candidates(ids, scores, first, pairwise.astype(np.float64)).is_plain
