"""Attention for blocks at many anchors of one finished text: the same `attend` contract as the engine's.

A block sees the text strictly before its anchor, and itself, both ways. All blocks share the text's keys, so scores
against it are one matrix product and nothing is copied per block.
"""

import torch
from torch import Tensor


class AnchorAttention:
    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, *, reach: int) -> None:
        """`context` holds each layer's keys and values of the text [T, Hkv, D]; blocks stand at `anchors` [N] in it.

        `reach` is the last anchor, given because asking a GPU for it would wait for all work before.
        """
        self.context = [(keys[:reach], values[:reach]) for keys, values in context]
        self.num_blocks = len(anchors)
        is_hidden = torch.arange(reach, device=anchors.device) >= anchors[:, None]
        self.bias = torch.zeros(is_hidden.shape, device=anchors.device).masked_fill_(is_hidden, float("-inf"))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, size = k.shape[1], num_rows // self.num_blocks
        keys, values = (x.transpose(0, 1) for x in self.context[layer])  # [Hkv, T, D]
        own_keys, own_values = (self._blocks(x, size) for x in (k, v))  # [Hkv, N, B, D]
        queries = q.view(self.num_blocks, size, num_kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4)  # [Hkv, N, G, B, D]
        queries = queries.reshape(num_kv_heads, self.num_blocks, -1, head_dim) * head_dim**-0.5  # [Hkv, N, G * B, D]
        before = (queries.flatten(1, 2) @ keys.transpose(1, 2)).view(*queries.shape[:3], -1)  # [Hkv, N, G * B, T]
        own = queries @ own_keys.transpose(2, 3)  # [Hkv, N, G * B, B]
        weights = torch.cat((before.float() + self.bias[:, None], own.float()), dim=-1).softmax(dim=-1).to(q.dtype)
        on_text, on_block = weights.split((keys.shape[1], size), dim=-1)
        out = (on_text.flatten(1, 2) @ values).view(queries.shape) + on_block @ own_values
        out = out.view(num_kv_heads, self.num_blocks, -1, size, head_dim).permute(1, 3, 0, 2, 4)
        return out.reshape(num_rows, num_heads * head_dim)

    def _blocks(self, x: Tensor, size: int) -> Tensor:
        """[N * B, Hkv, D] -> [Hkv, N, B, D]."""
        return x.view(self.num_blocks, size, *x.shape[1:]).permute(2, 0, 1, 3)
