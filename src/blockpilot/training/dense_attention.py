"""Attention over dense batches, for training and bulk generation: the same `attend` contract as the engine's.

Packed rows are a flattened [batch, time] grid here, so one scaled-dot-product call serves a whole batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class CausalAttention:
    """Whole sequences at once, nothing cached: the target's pass over finished texts."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, _split(k, self.batch_size), _split(v, self.batch_size), is_causal=True)


class StaticCacheAttention:
    """One new token per row against a preallocated cache; shapes never change, so the pass can be a CUDA graph.

    Row b writes at `positions[b]` and reads rows up to and including it, within the first `window` rows.
    """

    def __init__(self, cache: Tensor, positions: Tensor, window: int) -> None:
        self.cache = cache  # [layers, 2, B, Hkv, capacity, D]
        self.positions = positions
        self.window = window
        self.rows = torch.arange(len(positions), device=positions.device)
        seen = torch.arange(window, device=positions.device) <= positions[:, None]
        self.bias = torch.zeros(seen.shape, dtype=cache.dtype, device=cache.device).masked_fill_(~seen, float("-inf"))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        keys, values = self.cache[layer, 0], self.cache[layer, 1]
        keys[self.rows, :, self.positions] = k
        values[self.rows, :, self.positions] = v
        queries = q.view(num_rows, num_kv_heads, -1, head_dim)  # grouped heads as queries: keys are read once
        seen_keys, seen_values = keys[:, :, : self.window], values[:, :, : self.window]
        bias = self.bias[:, None, None].expand(-1, num_kv_heads, queries.shape[2], -1)
        out = F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=bias)  # [B, Hkv, G, D]
        return out.reshape(num_rows, num_heads * head_dim)


class PrefillAttention(CausalAttention):
    """Padded prompts of some rows, causal from position 0, written into the static cache."""

    def __init__(self, cache: Tensor, rows: Tensor, length: int) -> None:
        super().__init__(len(rows))
        self.cache, self.rows, self.length = cache, rows, length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for index, new in enumerate((k, v)):
            self.cache[layer, index, self.rows, :, : self.length] = _split(new, self.batch_size)
        return super().__call__(layer, q, k, v)


class BlockAttention:
    """Drafter blocks of many anchors: each block sees the context before its anchor, and itself, both ways.

    `mask` [B, blocks * size, time + blocks * size] is true where a query may look; `context` holds each layer's keys
    and values of the whole text, [B * time, Hkv, D].
    """

    def __init__(self, mask: Tensor, context: list[tuple[Tensor, Tensor]]) -> None:
        self.mask = mask[:, None]
        self.context = context

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        both = zip(self.context[layer], (k, v), strict=True)
        keys, values = (torch.cat([_split(x, len(self.mask)) for x in pair], dim=2) for pair in both)
        return _attend(q, keys, values, attn_mask=self.mask)


class UnrollAttention:
    """EAGLE-3 chains from every row of a text: a row sees the text up to its chain's start, and the chain itself."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.steps: list[list[Tensor]] = []  # keys and values [B, H, T, D] of every unrolled step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.steps.append([_expand(_split(x, self.batch_size), q.shape[1]) for x in (k, v)])
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*self.steps, strict=True))
        step, column = len(self.steps) - 1, torch.arange(len(q) // self.batch_size, device=q.device)
        start = column[:, None] - step  # of the chain that each row of this step belongs to
        masks = [column <= start, *(column == start + later for later in range(1, step + 1))]
        return _attend(q, keys, values, attn_mask=torch.cat(masks, dim=1))  # [T, (step + 1) * T]


def _attend(q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """What queries [B * T, H, D] read of keys and values [B, Hkv, S, D]: [B * T, H * D]."""
    keys, values = (_expand(x, q.shape[1]) for x in (keys, values))
    out = F.scaled_dot_product_attention(_split(q, len(keys)), keys, values, **options)
    return out.transpose(1, 2).reshape(q.shape[0], -1)


def _split(x: Tensor, batch_size: int) -> Tensor:
    """[B * T, H, D] -> [B, H, T, D]."""
    return x.view(batch_size, -1, *x.shape[1:]).transpose(1, 2)


def _expand(x: Tensor, num_heads: int) -> Tensor:
    """Repeat grouped heads: [B, Hkv, T, D] -> [B, H, T, D]."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
