"""One new token per row against a static cache, as one GPU kernel: reads each row's filled part and nothing else.

A program serves one row and one key-value head, for all query heads of that group, so that every key and value is read
once. The new token's key and value are written by the same program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS = 64
_MIN_GROUP = 16  # the smallest tile the matrix units take


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # compiled by Triton
    q, new_keys, new_values, keys, values, positions, out, scale, capacity,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    dims, members = tl.arange(0, DIM), tl.arange(0, TILE)
    is_member = members < GROUP
    query_offsets = ((row * HEADS + head) * GROUP + members[:, None]) * DIM + dims
    queries = tl.load(q + query_offsets, mask=is_member[:, None], other=0.0)
    new = (row * HEADS + head) * DIM + dims
    new_key, new_value = tl.load(new_keys + new), tl.load(new_values + new)
    base = (row * HEADS + head) * capacity * DIM
    tl.store(keys + base + position * DIM + dims, new_key)
    tl.store(values + base + position * DIM + dims, new_value)

    best = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full([TILE], 1.0, tl.float32)
    mixed = tl.zeros([TILE, DIM], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, position, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_seen = places < position
        offsets = base + places[:, None] * DIM + dims
        tile = tl.load(keys + offsets, mask=is_seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        tile = tl.load(values + offsets, mask=is_seen[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
        best = higher
    tl.store(out + query_offsets, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_member[:, None])


class BulkAttention:
    """The GPU form of `StaticCacheAttention`; `cache` is [layers, 2, B, Hkv, capacity, D]."""

    def __init__(self, cache: Tensor, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kernel: Any = _attend[(num_rows, num_kv_heads)]
        kernel(
            q.contiguous(), k.contiguous(), v.contiguous(), self.cache[layer, 0], self.cache[layer, 1],
            self.positions, out, head_dim**-0.5, self.cache.shape[4],
            HEADS=num_kv_heads, GROUP=group, TILE=max(_MIN_GROUP, triton.next_power_of_2(group)), DIM=head_dim,
            BLOCK=_BLOCK_ROWS,
        )  # fmt: skip
        return out.view(num_rows, num_heads * head_dim)
