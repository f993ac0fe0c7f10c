"""Ragged attention against one token at a time over everything it may see."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.cache.attention import RaggedAttention, Segment
from blockpilot.cache.slots import SlotCache
from blockpilot.core.tree import DraftTree
from tests.tiny import make_cache

HEAD_DIM, NUM_LAYERS = 6, 2
TREE = DraftTree.build(1, [(0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (1, 7)])


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, visible: np.ndarray) -> Tensor:
    """q [n, Hq, D], keys and values [m, Hkv, D], visible [n, m]: a loop over tokens and heads."""
    num_heads, group = q.shape[1], q.shape[1] // keys.shape[1]
    rows = []
    for token in range(q.shape[0]):
        seen = torch.from_numpy(np.flatnonzero(visible[token]))
        heads = []
        for head in range(num_heads):
            k, v = keys[seen, head // group], values[seen, head // group]
            weights = torch.softmax(k @ q[token, head] / math.sqrt(HEAD_DIM), dim=0)
            heads.append(weights @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def visible_rows(segment: Segment, num_committed: int) -> np.ndarray:
    if segment.is_bidirectional:
        block = np.ones((segment.count, segment.count), dtype=bool)
    elif segment.ancestors is not None:
        block = segment.ancestors
    else:
        block = np.tril(np.ones((segment.count, segment.count), dtype=bool))
    return np.concatenate((np.ones((segment.count, num_committed), dtype=bool), block), axis=1)


def make_filled_cache(num_kv_heads: int, lengths: list[int]) -> tuple[SlotCache, list[Tensor]]:
    """A cache whose slot i holds lengths[i] random rows, and those rows [layers, 2, length, heads, dim] per slot."""
    cache = make_cache(
        num_layers=NUM_LAYERS, num_slots=len(lengths), num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, capacity=40
    )
    cache.rows.fill_(float("nan"))  # a row that nobody wrote must never be read
    history = []
    for slot, length in enumerate(lengths):
        rows = torch.randn(NUM_LAYERS, 2, length, num_kv_heads, HEAD_DIM)
        cache.append(slot, length)
        for layer in range(NUM_LAYERS):
            cache.write(layer, slot, rows[layer, 0], rows[layer, 1])
        cache.keep(slot, range(length))
        history.append(rows)
    return cache, history


def check_pass(segments: list[Segment], *, lengths: list[int], num_heads: int, num_kv_heads: int) -> None:
    cache, history = make_filled_cache(num_kv_heads, lengths)
    attend = RaggedAttention(cache, segments)
    total = sum(segment.count for segment in segments)
    for layer in range(NUM_LAYERS):
        q = torch.randn(total, num_heads, HEAD_DIM)
        k, v = torch.randn(2, total, num_kv_heads, HEAD_DIM)
        expected, start = [], 0
        for segment in segments:
            rows = slice(start, start + segment.count)
            old = history[segment.slot][layer]
            keys, values = torch.cat((old[0], k[rows])), torch.cat((old[1], v[rows]))
            expected.append(naive_attention(q[rows], keys, values, visible_rows(segment, lengths[segment.slot])))
            start += segment.count
        torch.testing.assert_close(attend(layer, q, k, v), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1), (9, 3)])
@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 1),
        Segment(0, 7),
        Segment(0, len(TREE), TREE.ancestor_matrix()),
        Segment(0, 7, is_bidirectional=True),
    ],
    ids=["one token", "causal", "ancestors", "bidirectional"],
)
def test_one_segment(segment: Segment, length: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    check_pass([segment], lengths=[length], num_heads=num_heads, num_kv_heads=num_kv_heads)


def test_segments_of_different_lengths_and_masks_in_one_pass() -> None:
    torch.manual_seed(1)
    segments = [
        Segment(2, 5),
        Segment(0, len(TREE), TREE.ancestor_matrix()),
        Segment(3, 1),
        Segment(1, 4, is_bidirectional=True),
    ]
    check_pass(segments, lengths=[11, 3, 0, 8], num_heads=6, num_kv_heads=2)


def test_the_order_of_segments_is_the_order_of_packed_tokens() -> None:
    torch.manual_seed(2)
    check_pass([Segment(1, 2), Segment(0, 3)], lengths=[4, 9], num_heads=2, num_kv_heads=2)
