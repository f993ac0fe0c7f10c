"""Chains and trees out of candidates, against every path written out."""

from itertools import islice, product
from operator import le

import numpy as np
import pytest

from blockpilot.core.candidates import Candidates, ProposedTree
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import Nodes
from blockpilot.pilots.growth import (
    Growth,
    best_first,
    grow_by_cost,
    grow_chain,
    grow_tree,
    likeliest_chain,
    proposed_chain,
    proposed_nodes,
    smallest_rises,
)
from tests.support import child_log_probs

POSITIONS, WIDTH = 4, 3
TOKEN_IDS = np.arange(POSITIONS * WIDTH, dtype=np.int64).reshape(POSITIONS, WIDTH) + 100


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return (scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))).astype(np.float32)


def random_candidates(seed: int, *, is_pairwise: bool) -> Candidates:
    random = np.random.default_rng(seed)
    marginals = -np.sort(-log_softmax(random.normal(size=(POSITIONS, WIDTH)) * 2))
    if not is_pairwise:
        return Candidates(TOKEN_IDS, marginals)
    pairwise = log_softmax(random.normal(size=(POSITIONS - 1, WIDTH, WIDTH)) * 2)
    return Candidates(TOKEN_IDS, marginals, first=log_softmax(random.normal(size=WIDTH)), pairwise=pairwise)


def score_every_path(candidates: Candidates) -> dict[tuple[int, ...], float]:
    """Token path -> sum of the log-probabilities on it, for every path of every length."""
    scores = {}
    for depth in range(1, candidates.num_positions + 1):
        for ranks in product(range(candidates.width), repeat=depth):
            parents = (0, *ranks)
            steps = [child_log_probs(candidates, d, parents[d])[rank] for d, rank in enumerate(ranks)]
            path = tuple(int(candidates.token_ids[d, rank]) for d, rank in enumerate(ranks))
            scores[path] = float(np.sum(steps, dtype=np.float64))
    return scores


def paths_of(nodes: Nodes) -> list[tuple[int, ...]]:
    tree = DraftTree.build(0, nodes)  # refuses a child that stands before its parent
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
    return paths[1:]


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 17, 60])
@pytest.mark.parametrize("seed", range(3))
def test_tree_holds_the_best_nodes_of_all(seed: int, num_nodes: int, is_pairwise: bool) -> None:
    candidates = random_candidates(seed, is_pairwise=is_pairwise)
    scores = score_every_path(candidates)
    paths = paths_of(grow_tree(candidates, num_nodes))
    assert len(set(paths)) == num_nodes
    best = sorted(scores.values(), reverse=True)[:num_nodes]
    np.testing.assert_allclose([scores[path] for path in paths], best, atol=1e-5)  # best first, too


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_tree_ends_where_candidates_end(is_pairwise: bool) -> None:
    candidates = random_candidates(0, is_pairwise=is_pairwise)
    paths = paths_of(grow_tree(candidates, 10_000))
    assert len(paths) == len(set(paths)) == len(score_every_path(candidates)) == 3 + 9 + 27 + 81


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("max_nodes", [0, 1, 3, 4, 9])
def test_chain_follows_the_best_child_of_each_node(max_nodes: int, is_pairwise: bool) -> None:
    candidates = random_candidates(1, is_pairwise=is_pairwise)
    nodes = grow_chain(candidates, max_nodes)
    assert len(nodes) == min(max_nodes, POSITIONS)
    rank = 0
    for position, (parent, token_id) in enumerate(nodes):
        rank = max(range(WIDTH), key=lambda child: child_log_probs(candidates, position, rank)[child])
        assert (parent, token_id) == (position, TOKEN_IDS[position, rank])


def test_chain_depends_on_the_parent_and_not_only_on_marginals() -> None:
    marginals = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    pairwise = np.log(np.array([[[0.2, 0.8], [0.5, 0.5]]], dtype=np.float32))
    first = np.log(np.array([0.7, 0.3], dtype=np.float32))
    ids = np.array([[1, 2], [3, 4]])
    assert grow_chain(Candidates(ids, marginals), 2) == [(0, 1), (1, 3)]
    assert grow_chain(Candidates(ids, marginals, first=first, pairwise=pairwise), 2) == [(0, 1), (1, 4)]


def test_no_candidates_no_nodes() -> None:
    empty = Candidates(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert grow_chain(empty, 8) == grow_tree(empty, 8) == []


def random_costs(seed: int, count: int) -> list[float]:
    """Rising, with stairs and plateaus."""
    random = np.random.default_rng(seed)
    rises = random.choice([0.0, 0.01, 0.05, 0.3], size=count) * random.random(count)
    return (1 + np.concatenate([[0], rises.cumsum()])).tolist()


def best_rate(probabilities: list[float], costs: list[float]) -> float:
    expected = np.concatenate([[1], 1 + np.cumsum(probabilities)])
    return max(float(e / c) for e, c in zip(expected, costs, strict=False))


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_growth_by_cost_finds_the_best_rate_of_all(seed: int, is_chain: bool) -> None:
    candidates = random_candidates(seed, is_pairwise=True)
    assert candidates.first is not None and candidates.pairwise is not None
    given = (np.exp(candidates.first), np.exp(candidates.pairwise), candidates.token_ids)
    make = likeliest_chain if is_chain else best_first
    costs = random_costs(seed, 40)
    growth = grow_by_cost(make(*given), costs)
    every = [probability for probability, _, _ in make(*given)]
    assert (1 + growth.promised) / costs[len(growth.nodes)] == pytest.approx(best_rate(every[:40], costs))
    chosen = (grow_chain if is_chain else grow_tree)(candidates, len(growth.nodes))
    assert growth.nodes == chosen
    assert growth.depth == max((len(path) for path in paths_of(chosen)), default=0)


def test_growth_by_cost_ends_early_where_nothing_can_win() -> None:
    taken = 0

    def stream():
        nonlocal taken
        for place in range(100):
            taken += 1
            yield 0.5 ** (place + 1), place, 7

    growth = grow_by_cost(stream(), [1 + 0.1 * n for n in range(64)])
    assert 1 <= len(growth.nodes) < taken < 10
    assert grow_by_cost(stream(), [1.0, 3.0, 5.0]).nodes == [], "nothing is worth twice a plain step"
    assert len(grow_by_cost(stream(), [1.0] * 31).nodes) == 30, "for free, everything is"
    assert len(grow_by_cost(stream(), [1 + 0.1 * n for n in range(64)], trust=0.3).nodes) == 1 < len(growth.nodes)
    taken = 0
    assert len(grow_by_cost(stream(), [1 + n // 8 for n in range(64)]).nodes) == 7 < taken < 10, "stairs end it, too"


def test_a_drafters_own_tree_is_pruned_by_value() -> None:
    log_probs = np.log(np.array([0.6, 0.3, 0.5, 0.9, 0.2], dtype=np.float32))
    tree = ProposedTree(np.array([0, 0, 1, 2, 3]), np.array([10, 11, 12, 13, 14]), log_probs)
    growth = grow_by_cost(proposed_nodes(tree), [1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    assert growth.nodes == [(0, 10), (0, 11), (1, 12), (2, 13)]  # 0.6, 0.3, 0.3, 0.27; 0.06 does not pay
    assert growth.promised == pytest.approx(0.6 + 0.3 + 0.3 + 0.27)
    assert [node for _, *node in proposed_chain(tree)] == [[0, 10], [1, 12], [2, 14]]


def test_equal_siblings_come_in_the_order_of_their_ranks() -> None:
    first = np.array([0.25, 0.5, 0.25, 0.25], dtype=np.float32)
    nodes = list(best_first(first, np.zeros((0, 4, 4), dtype=np.float32), np.array([[10, 11, 12, 13]])))
    assert nodes == [(0.5, 0, 11), (0.25, 0, 10), (0.25, 0, 12), (0.25, 0, 13)]


def test_of_equal_paths_the_older_comes_first() -> None:
    halves = np.full((2, 2, 2), 0.5, dtype=np.float32)
    nodes = [node for _, *node in islice(best_first(halves[0, 0], halves, TOKEN_IDS[:3, :2]), 6)]
    assert nodes == [[0, 100], [0, 101], [1, 103], [2, 103], [1, 104], [2, 104]]


def test_known_rises_change_nothing() -> None:
    candidates, costs = random_candidates(4, is_pairwise=True), random_costs(4, 40)
    assert candidates.first is not None and candidates.pairwise is not None
    given = (np.exp(candidates.first), np.exp(candidates.pairwise), candidates.token_ids)
    rises = smallest_rises(np.array(costs)).tolist()
    least = [min((costs[m] - costs[n]) / (m - n) for m in range(n + 1, 41)) for n in range(40)]
    assert rises == pytest.approx(least, abs=1e-9) and all(map(le, rises, least))
    assert grow_by_cost(best_first(*given), costs, 0.9, rises) == grow_by_cost(best_first(*given), costs, 0.9)


def test_a_tree_holds_no_more_than_one_check_takes() -> None:
    for size in (0, 3, MAX_TREE_NODES, MAX_TREE_NODES + 5):
        parents, token_ids, depths = list(range(size)), list(range(100, 100 + size)), list(range(1, size + 1))
        tree = Growth(parents, token_ids, depths, size, 1.0).tree(7)
        assert tree == DraftTree.chain(7, token_ids[:MAX_TREE_NODES])
