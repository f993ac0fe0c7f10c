"""Attention over ragged requests: packed queries in, each request reads only the filled part of its own slot.

`RaggedAttention` is the `attend` function that models are given. It stands for one pass: it knows how the packed tokens
split into segments (one per request), opens cache rows for them and masks what a token may see:

    causal          itself and the tokens before it (prompts, chains)
    ancestors       itself and its ancestors in the draft tree, all before the tree
    bidirectional   the whole block (diffusion drafters)

This is the reference implementation, used on every device: one scaled-dot-product call per request and layer. Grouped
query heads are folded into the query axis, so keys and values are never expanded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.cache.slots import SlotCache


@dataclass(frozen=True)
class Segment:
    """`count` consecutive packed tokens of the request in `slot`."""

    slot: int
    count: int
    ancestors: NDArray[np.bool_] | None = None  # [n, w] which of the last w >= n rows each token sees; None: causal
    is_bidirectional: bool = False


class RaggedAttention:
    def __init__(self, cache: SlotCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        self.segments = segments
        starts = [cache.append(segment.slot, segment.count) for segment in segments]
        self.masks = [self._mask(segment, start) for segment, start in zip(segments, starts, strict=True)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.segments) == 1:
            return self._attend(layer, 0, q, k, v)
        outputs, start = [], 0
        for index, segment in enumerate(self.segments):
            rows = slice(start, start + segment.count)
            outputs.append(self._attend(layer, index, q[rows], k[rows], v[rows]))
            start += segment.count
        return torch.cat(outputs)

    def _attend(self, layer: int, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        keys, values = self.cache.write(layer, self.segments[index].slot, k, v)
        grouped = q.view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        grouped = grouped.reshape(1, num_kv_heads, -1, head_dim)  # [1, Hkv, G * n, D]
        mask = self.masks[index]
        if mask is not None and len(mask) < grouped.shape[2]:  # once per grouped head, at the first layer for all
            mask = self.masks[index] = mask.repeat(num_heads // num_kv_heads, 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.view(num_kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape(count, -1)

    def _mask(self, segment: Segment, start: int) -> Tensor | None:
        """Additive mask [n, start + n]; None where every token may see every row."""
        width = segment.count if segment.ancestors is None else segment.ancestors.shape[1]
        if width == 1 or segment.is_bidirectional:
            return None
        rows = self.cache.rows
        mask = torch.zeros(segment.count, start + segment.count, dtype=rows.dtype)
        block = torch.full((segment.count, width), float("-inf"), dtype=rows.dtype)
        if segment.ancestors is None:
            block.triu_(diagonal=1)
        else:
            block.masked_fill_(torch.from_numpy(segment.ancestors), 0)
        mask[:, start + segment.count - width :] = block
        return mask.to(rows.device)
