"""Acceptance on trees made by hand, and against a naive walk on random ones."""

from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.tree import DraftTree
from blockpilot.decoding.verification import Acceptance, accept


def test_nothing_drafted_emits_the_targets_token() -> None:
    assert accept(DraftTree.chain(9, []), [4]) == Acceptance((0,), (4,))


def test_a_chain_that_is_all_right_gains_one_token_for_free() -> None:
    assert accept(DraftTree.chain(9, [1, 2, 3]), [1, 2, 3, 7]) == Acceptance((0, 1, 2, 3), (1, 2, 3, 7))


def test_a_chain_ends_at_its_first_wrong_token() -> None:
    assert accept(DraftTree.chain(9, [1, 2, 3]), [1, 5, 3, 7]) == Acceptance((0, 1), (1, 5))


def test_right_tokens_after_a_wrong_one_do_not_count() -> None:
    assert accept(DraftTree.chain(9, [1, 2, 3]), [8, 2, 3, 7]) == Acceptance((0,), (8,))


def test_the_walk_takes_the_branch_of_the_targets_token() -> None:
    tree = DraftTree.build(9, [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4)])
    assert accept(tree, [2, 0, 4, 0, 0, 6]) == Acceptance((0, 2, 5), (2, 4, 6))
    assert accept(tree, [1, 3, 0, 6, 0, 0]) == Acceptance((0, 1, 3), (1, 3, 6))


def test_a_token_drafted_elsewhere_in_the_tree_is_no_child() -> None:
    tree = DraftTree.build(9, [(0, 1), (0, 2), (1, 3)])
    assert accept(tree, [2, 0, 3, 0]) == Acceptance((0, 2), (2, 3))


def test_duplicate_siblings_count_once_and_the_first_wins() -> None:
    tree = DraftTree.build(9, [(0, 1), (0, 1), (2, 5), (1, 6)])
    assert accept(tree, [1, 6, 5, 0, 8]) == Acceptance((0, 1, 4), (1, 6, 8))


@st.composite
def trees_with_answers(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    size = draw(st.integers(0, 14))
    nodes = [(draw(st.integers(0, index)), draw(st.integers(0, 2))) for index in range(size)]
    return DraftTree.build(9, nodes), draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))


@given(trees_with_answers())
def test_emitted_tokens_are_the_targets_own_along_a_path_from_the_anchor(case: tuple[DraftTree, list[int]]) -> None:
    tree, target_ids = case
    result = accept(tree, target_ids)
    assert result.path[0] == 0
    assert result.emitted_ids == tuple(target_ids[node] for node in result.path)
    for parent, node in zip(result.path, result.path[1:], strict=False):
        assert tree.parents[node] == parent
        assert tree.token_ids[node] == target_ids[parent]
    last = result.path[-1]
    matching = [n for n in range(1, len(tree)) if tree.parents[n] == last and tree.token_ids[n] == target_ids[last]]
    assert matching == [], "the walk ended although a child matched"
