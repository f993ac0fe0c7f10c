"""What each token of a pass sees, and which attend together."""

import ctypes
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.cpu.tokens import MAX_SCORES, Columns, Tokens
from blockpilot.native.library import MAX_ASKED, BatchData
from tests.unit.cpu.pieces import draw_tree, seeds


def seen_rows(tokens: Tokens, token: int) -> list[int]:
    placed, keys, start = tokens.num_placed[token], tokens.num_keys[token], tokens.list_starts[token]
    return [*range(placed), *tokens.lists[start : start + keys - placed]]


def read_runs(batch: BatchData) -> list[int]:
    return list((ctypes.c_int32 * (batch.num_runs + 1)).from_address(batch.runs))


@settings(deadline=None)
@given(requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4), seed=seeds)
def test_a_node_sees_its_slot_and_its_ancestors(requests: list[tuple[int, int]], seed: int) -> None:
    tokens, expected = Tokens(), []
    for slot, (start, count) in enumerate(requests):
        tree = draw_tree(Random(seed + slot), count)
        tokens.add_tree(slot, start, tree)
        for node, row in enumerate(tree.ancestor_matrix()):
            seen = [*range(start), *(start + np.flatnonzero(row)).tolist()]
            expected.append((tree.token_ids[node], start + tree.depths[node], slot, start + node, seen))
    columns = zip(tokens.token_ids, tokens.positions, tokens.slots, tokens.stored, strict=True)
    assert [(*column, seen_rows(tokens, token)) for token, column in enumerate(columns)] == expected


def test_a_chain_sees_what_lies_before_it_and_a_block_all_of_itself() -> None:
    tokens = Tokens()
    tokens.add_chain(1, 4, [7, 8, 9])
    tokens.add_block(0, 2, [5, 6], 3)
    assert [seen_rows(tokens, token) for token in range(5)] == [list(range(n)) for n in (5, 6, 7, 4, 4)]
    assert tokens.positions == [4, 5, 6, 3, 4] and tokens.stored == [4, 5, 6, 2, 3] and tokens.slots == [1, 1, 1, 0, 0]


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    start=st.sampled_from([0, 1, 500, 3000, 40_000]),
    group=st.sampled_from([1, 2, 3, 7, 64, 100]),
)
def test_runs_are_of_one_request_and_bounded(counts: list[int], start: int, group: int) -> None:
    tokens = Tokens()
    for slot, count in enumerate(counts):
        tokens.add_chain(slot, start, [1] * count)
    batch, kept = tokens.describe(0, group)
    runs = read_runs(batch)
    del kept
    assert runs[0] == 0 and runs[-1] == sum(counts) == batch.count
    assert batch.num_rows == start + max(counts)
    assert set(np.cumsum([0, *counts]).tolist()) <= set(runs)
    sizes = np.diff(runs)
    assert sizes.min() >= 1 and sizes.max() <= batch.run_size
    assert batch.run_size == 1 or (
        batch.run_size * group <= MAX_ASKED and batch.run_size * group * batch.num_rows <= MAX_SCORES
    )


@pytest.mark.parametrize("lists", [[[]], [[1, 2], [], [-3]], [range(5), (2**31 - 1,)]])
def test_columns_lie_where_they_say(lists: list[list[int]]) -> None:
    columns = Columns(*lists)
    for values, address in zip(lists, columns.addresses, strict=True):
        assert list((ctypes.c_int32 * len(values)).from_address(address)) == list(values)
