import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from tests.support import children_of


@st.composite
def node_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    size = draw(st.integers(0, 12))
    return [(draw(st.integers(0, index)), draw(st.integers(0, 3))) for index in range(size)]


def test_chain_is_the_tree_with_one_child_per_node():
    chain = DraftTree.chain(7, [1, 2, 3])
    assert chain == DraftTree.build(7, [(0, 1), (1, 2), (2, 3)])
    assert chain.is_chain
    assert (len(chain), chain.max_depth) == (4, 3)
    assert chain.parents == (-1, 0, 1, 2)


def test_anchor_alone():
    tree = DraftTree.build(7, [])
    assert tree == DraftTree.chain(7, [])
    assert tree.is_chain
    assert tree.ancestor_matrix().tolist() == [[True]]


def test_branching_tree():
    tree = DraftTree.build(7, [(0, 1), (0, 2), (1, 3)])
    assert not tree.is_chain
    assert tree.depths == (0, 1, 1, 2)
    assert children_of(tree) == [{1: 1, 2: 2}, {3: 3}, {}, {}]
    assert np.flatnonzero(tree.ancestor_matrix()[3]).tolist() == [0, 1, 3]


@pytest.mark.parametrize("parent", [-1, 1, 9])
def test_parent_must_stand_before_its_child(parent):
    with pytest.raises(InputError, match="parent"):
        DraftTree.build(7, [(parent, 1)])


@given(node_lists())
def test_every_row_of_the_mask_is_the_path_to_the_anchor(nodes):
    tree = DraftTree.build(7, nodes)
    matrix = tree.ancestor_matrix()
    assert matrix.sum(axis=1).tolist() == [depth + 1 for depth in tree.depths]
    for index in range(len(tree)):
        path, node = set(), index
        while node >= 0:
            path.add(node)
            node = tree.parents[node]
        assert set(np.flatnonzero(matrix[index])) == path


@given(node_lists())
def test_chain_flag_means_one_path(nodes):
    tree = DraftTree.build(7, nodes)
    assert tree.is_chain == (tree.parents == tuple(range(-1, len(tree) - 1)))


def test_up_to_drops_deeper_nodes_and_renumbers() -> None:
    tree = DraftTree.build(1, [(0, 5), (1, 6), (0, 7), (2, 8), (3, 9)])
    short = tree.up_to(1)
    assert (short.token_ids, short.parents, short.depths) == ((1, 5, 7), (-1, 0, 0), (0, 1, 1))
    assert tree.up_to(3) is tree
    assert tree.up_to(0).token_ids == (1,)
