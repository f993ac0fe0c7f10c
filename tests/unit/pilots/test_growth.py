"""Chains and trees out of drafts, against every path written out."""

from itertools import product
from operator import le

import numpy as np
import pytest

from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.copies import NOTHING_COPIED, Copied
from blockpilot.pilots.forecast import load_loops
from blockpilot.pilots.growth import (
    NO_WEIGHTS,
    GrowthRules,
    Nodes,
    falling_costs,
    grow_chain,
    grow_nodes,
    grow_tree,
    plain_arrays,
    smallest_rises,
)
from tests.support import child_log_probs, paths_of
from tests.unit.pilots.pieces import nodes_of, random_draft

POSITIONS, WIDTH = 4, 3


def small_draft(seed: int, *, is_pairwise: bool) -> HostDraft:
    return random_draft(seed, depth=POSITIONS, width=WIDTH, is_pairwise=is_pairwise)


def best_nodes(draft: HostDraft, num_nodes: int) -> DraftTree:
    """The likeliest ones, however much they cost."""
    return grow_tree(draft, 9, GrowthRules(falling_costs(num_nodes), depth=draft.num_positions)).tree


def score_every_path(draft: HostDraft) -> dict[tuple[int, ...], float]:
    """Token path -> its probability, for every path of every length."""
    scores = {}
    for depth in range(1, draft.num_positions + 1):
        for ranks in product(range(draft.width), repeat=depth):
            parents = (0, *ranks)
            steps = [child_log_probs(draft, d, parents[d])[rank] for d, rank in enumerate(ranks)]
            path = tuple(int(draft.token_ids[d, rank]) for d, rank in enumerate(ranks))
            scores[path] = float(np.exp(np.sum(steps, dtype=np.float64)))
    return scores


def best_chain(draft: HostDraft) -> list[tuple[int, ...]]:
    """The paths to its nodes: at every position the likeliest child of the one before."""
    path: tuple[int, ...] = ()
    paths, rank = [], 0
    for position in range(draft.num_positions):
        scores = child_log_probs(draft, position, rank)
        rank = max(range(draft.width), key=lambda child: scores[child])
        path = (*path, int(draft.token_ids[position, rank]))
        paths.append(path)
    return paths


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 17, 60])
@pytest.mark.parametrize("seed", range(3))
def test_tree_holds_the_best_nodes_of_all(seed: int, num_nodes: int, is_pairwise: bool) -> None:
    draft = small_draft(seed, is_pairwise=is_pairwise)
    scores = score_every_path(draft)
    paths = paths_of(best_nodes(draft, num_nodes))
    assert len(set(paths)) == num_nodes
    best = sorted(scores.values(), reverse=True)[:num_nodes]
    np.testing.assert_allclose([scores[path] for path in paths], best, rtol=1e-5)  # best first, too


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_tree_ends_where_candidates_end(is_pairwise: bool) -> None:
    draft = small_draft(0, is_pairwise=is_pairwise)
    paths = paths_of(best_nodes(draft, 1000))
    assert len(paths) == len(set(paths)) == len(score_every_path(draft)) == 3 + 9 + 27 + 81


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(0, 3), (1, 3), (2, 2), (9, 1)])
def test_a_tree_may_be_held_shallow_and_narrow(depth: int, width: int, is_pairwise: bool) -> None:
    draft = small_draft(2, is_pairwise=is_pairwise)
    rules = GrowthRules(falling_costs(200), depth, width=width)
    expected = score_every_path(draft.map(np.ascontiguousarray).cut(min(depth, POSITIONS), width)) if depth else {}
    if width == 1 and is_pairwise:  # of one candidate there are no pairs to choose from
        expected = {
            path: score for path, score in score_every_path(draft).items() if set(path) <= set(draft.token_ids[:, 0])
        }
    assert set(paths_of(grow_tree(draft, 9, rules).tree)) == set(expected)


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("max_nodes", [0, 1, 3, 4, 9])
def test_chain_follows_the_best_child_of_each_node(max_nodes: int, is_pairwise: bool) -> None:
    draft = small_draft(1, is_pairwise=is_pairwise)
    chain = grow_chain(draft, 9, max_nodes)
    assert chain.is_chain and chain.token_ids[0] == 9 and paths_of(chain) == best_chain(draft)[:max_nodes]


def test_chain_depends_on_the_parent_and_not_only_on_marginals() -> None:
    marginals = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    pairwise = np.log(np.array([[[0.2, 0.8], [0.5, 0.5]]], dtype=np.float32))
    first = np.log(np.array([0.7, 0.3], dtype=np.float32))
    ids = np.array([[1, 2], [3, 4]])
    assert grow_chain(Draft(ids, marginals), 9, 2) == DraftTree.chain(9, [1, 3])
    assert grow_chain(Draft(ids, marginals, first=first, pairwise=pairwise), 9, 2) == DraftTree.chain(9, [1, 4])


def test_no_candidates_no_nodes() -> None:
    empty: HostDraft = Draft(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert grow_chain(empty, 9, 8) == best_nodes(empty, 8) == DraftTree.chain(9, [])


def random_costs(seed: int, count: int) -> np.ndarray:
    """Rising, with stairs and plateaus."""
    random = np.random.default_rng(seed)
    rises = random.choice([0.0, 0.01, 0.05, 0.3], size=count) * random.random(count)
    return 1 + np.concatenate([[0], rises.cumsum()])


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_growth_by_cost_finds_the_best_rate_of_all(seed: int, is_pairwise: bool, is_chain: bool) -> None:
    """Written out: all paths best first, and the number of them that brings most tokens per millisecond."""
    draft, costs, trust = small_draft(seed, is_pairwise=is_pairwise), random_costs(seed, 40), (0.5, 1.0, 1.3)[seed % 3]
    scores = score_every_path(draft)
    every = best_chain(draft) if is_chain else sorted(scores, key=lambda path: -scores[path])
    values = np.cumsum([0.0, *(scores[path] for path in every[:40])])
    count = int(((1 + trust * values) / costs[: len(values)]).argmax())
    nodes = grow_nodes(draft, GrowthRules((costs, smallest_rises(costs)), POSITIONS, trust=trust, is_chain=is_chain))
    assert paths_of(DraftTree.build(9, list(zip(nodes.parents, nodes.token_ids, strict=True)))) == every[:count]
    assert nodes.depths == [len(path) for path in every[:count]]
    np.testing.assert_allclose(nodes.paths, [scores[path] for path in every[:count]], rtol=1e-5)
    assert nodes.promised == pytest.approx(values[count], rel=1e-5)
    np.testing.assert_allclose(nodes.head, [scores[path] for path in best_chain(draft)[:3]], rtol=1e-5)


def test_growth_by_cost_weighs_every_node() -> None:
    halves: HostDraft = Draft(np.full((63, 1), 7), np.full((63, 1), np.log(0.5), dtype=np.float32))

    def count(step_ms: list[float], trust: float = 1.0) -> int:
        costs = np.array(step_ms, dtype=np.float64)
        return len(grow_nodes(halves, GrowthRules((costs, smallest_rises(costs)), 63, trust=trust)).parents)

    slow = [1 + 0.1 * n for n in range(64)]
    assert count(slow) == 2, "0.5 and 0.25 are worth a tenth of a step, 0.125 no longer"
    assert count(slow, trust=0.3) == 1
    assert count([1.0, 3.0, 5.0]) == 0, "nothing is worth twice a plain step"
    assert count([1.0] * 31) == 30, "for free, everything is"
    assert count([1 + n // 8 for n in range(64)]) == 7, "stairs end it, too"
    assert count([1.0, 1.6, 1.6, 1.6]) == 3, "the first node alone does not pay, all three do"


def test_growth_by_cost_ends_early_where_nothing_can_win() -> None:
    halves: HostDraft = Draft(np.full((63, 1), 7), np.full((63, 1), np.log(0.5), dtype=np.float32))
    for step_ms in (1 + 0.1 * np.arange(64), 1 + np.arange(64.0) // 8):  # stairs, too
        found, paths = np.full((3, 64), -5), np.empty(64)
        given = (
            *plain_arrays(halves),
            NO_WEIGHTS,
            *NOTHING_COPIED,
            step_ms,
            smallest_rises(step_ms),
            1.0,
            1,
            63,
            False,
        )
        count, _, _ = load_loops().grow(found, paths, *given)
        assert 1 <= count <= int((found[0, 1:] >= 0).sum()) < 10


def make_proposed(parents: list[int], token_ids: list[int], probabilities: list[float]) -> HostDraft:
    """As a drafter hands its own tree over, behind the anchor 9."""
    log_probs = np.log(np.array(probabilities, dtype=np.float32))
    tree = DraftTree.build(9, list(zip(parents, token_ids, strict=True)))
    return Draft(
        np.zeros((tree.max_depth, 1), np.int64), np.zeros((tree.max_depth, 1), np.float32), None, None, tree, log_probs
    )


def test_a_drafters_own_tree_is_pruned_by_value() -> None:
    draft = make_proposed([0, 0, 1, 2, 3], [10, 11, 12, 13, 14], [0.6, 0.3, 0.5, 0.9, 0.2])
    costs = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    rules = GrowthRules((costs, smallest_rises(costs)), depth=9)
    tree, promised, head = grow_tree(draft, 9, rules)
    assert nodes_of(tree) == [(0, 10), (0, 11), (1, 12), (2, 13)]  # 0.6, 0.3, 0.3, 0.27; 0.06 does not pay
    assert tree.depths == (0, 1, 1, 2, 2) and promised == pytest.approx(0.6 + 0.3 + 0.3 + 0.27)
    assert head == pytest.approx([0.6, 0.3, 0.06])
    assert grow_chain(draft, 9, 99) == DraftTree.chain(9, [10, 12, 14])
    assert grow_tree(draft, 9, rules._replace(is_chain=True)).tree == DraftTree.chain(9, [10, 12])
    assert nodes_of(grow_tree(draft, 9, rules._replace(depth=1)).tree) == [(0, 10), (0, 11)]


def test_equal_siblings_come_in_the_order_of_their_ranks() -> None:
    scores = np.log(np.array([[0.25, 0.5, 0.25, 0.25]], dtype=np.float32))
    assert nodes_of(best_nodes(Draft(np.array([[10, 11, 12, 13]]), scores), 4)) == [(0, 11), (0, 10), (0, 12), (0, 13)]


def test_of_equal_paths_the_older_comes_first() -> None:
    ids, halves = np.array([[100, 101], [103, 104], [106, 107]]), np.full((3, 2), np.log(0.5), dtype=np.float32)
    expected = [(0, 100), (0, 101), (1, 103), (2, 103), (1, 104), (2, 104)]
    assert nodes_of(best_nodes(Draft(ids, halves), 6)) == expected


def test_smallest_rises_are_the_least_that_further_nodes_cost() -> None:
    costs = random_costs(4, 40)
    rises = smallest_rises(costs).tolist()
    least = [min((costs[m] - costs[n]) / (m - n) for m in range(n + 1, 41)) for n in range(40)]
    assert rises == pytest.approx(least, abs=1e-9) and all(map(le, rises, least))


def test_falling_costs_take_every_node_whatever_it_is_worth() -> None:
    draft = random_draft(3, depth=15, width=4)
    doubtful = Calibration(np.array([[-9.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    for num_nodes in (0, 1, 128):
        rules = GrowthRules(falling_costs(num_nodes), 15, doubtful, trust=0.01)
        assert len(grow_nodes(draft, rules).parents) == num_nodes


def test_a_copy_goes_on_where_the_draft_ends() -> None:
    """And nothing but the copy is taken behind it."""
    draft = random_draft(0, depth=2, width=3, is_pairwise=True)
    copied = Copied(np.arange(20, 26), np.full(6, 0.9, np.float32))
    nodes = grow_nodes(draft, GrowthRules(falling_costs(60), depth=6, copied=copied))
    chain, parent = [], 0
    for token_id in copied.token_ids.tolist():
        places = [
            place
            for place, (above, found) in enumerate(zip(nodes.parents, nodes.token_ids, strict=True), start=1)
            if above == parent and found == token_id
        ]
        assert len(places) == 1
        parent = places[0]
        chain.append(nodes.paths[parent - 1])
    assert chain[2:] == pytest.approx([chain[1] * 0.9**n for n in range(1, 5)])
    assert [depth for depth in nodes.depths if depth > 2] == [3, 4, 5, 6]
    assert (
        len(grow_nodes(draft, GrowthRules(falling_costs(60), depth=4, copied=copied)).parents) == len(nodes.parents) - 2
    )


@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_children_of_a_copy_share_what_it_leaves(seed: int, is_pairwise: bool) -> None:
    draft = small_draft(seed, is_pairwise=is_pairwise)
    ids = np.array([int(draft.token_ids[0, 1]), 77, int(draft.token_ids[2, 0])])  # known, unknown, known
    copied = Copied(ids, np.array([0.7, 0.6, 0.8], np.float32))
    rules = GrowthRules(falling_costs(400), depth=POSITIONS)  # more than there are
    alone, both = grow_nodes(draft, rules), grow_nodes(draft, rules._replace(copied=copied))
    children: dict[int, list[float]] = {}
    ways = [(1.0, ())]
    for parent, token_id, path in zip(both.parents, both.token_ids, both.paths, strict=True):
        above, way = ways[parent]
        ways.append((path, (*way, token_id)))
        children.setdefault(parent, []).append(path / above)
    assert all(sum(shares) < 1 + 1e-5 for shares in children.values())
    assert len({way for _, way in ways}) == len(ways), "no path twice"
    found = {way: path for path, way in ways}
    assert tuple(ids[:2].tolist()) in found and tuple(ids.tolist()) in found
    elsewhere = {way for way in found if way and way[0] != ids[0]}
    assert elsewhere == {way for way in _paths(alone) if way[0] != ids[0]}, "other branches are the drafter's own"


def _paths(nodes: Nodes) -> list[tuple[int, ...]]:
    ways: list[tuple[int, ...]] = [()]
    for parent, token_id in zip(nodes.parents, nodes.token_ids, strict=True):
        ways.append((*ways[parent], token_id))
    return ways[1:]


def test_a_copy_that_the_drafter_agrees_with_is_likelier() -> None:
    ids, scores = np.array([[5, 6]]), np.log(np.array([[0.6, 0.3]], np.float32))
    draft: HostDraft = Draft(ids, scores)

    def first(token_id: int, likely: float) -> float:
        copied = Copied(np.array([token_id]), np.array([likely], np.float32))
        nodes = grow_nodes(draft, GrowthRules(falling_costs(9), depth=1, copied=copied))
        return dict(zip(nodes.token_ids, nodes.paths, strict=True))[token_id]

    assert first(5, 0.5) > first(6, 0.5) > first(7, 0.5)
    assert first(5, 0.9) > first(5, 0.5) > first(5, 0.1)
    assert first(6, 0.9) > 0.3, "the text raises what the drafter holds for less likely"
