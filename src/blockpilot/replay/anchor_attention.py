"""Attention for blocks at many anchors of finished texts: the same `attend` contract as the engine's.

A block sees its text strictly before its anchor, and itself, both ways. All blocks of a text share its keys, so scores
against the texts are one batched matrix product and nothing is copied per block.
"""

import torch
from torch import Tensor


class AnchorAttention:
    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, *, reach: int) -> None:
        """`context` holds each layer's keys and values of S texts [S, Hkv, T, D]; blocks stand at `anchors` [S, N].

        `reach` is the last anchor of all, given because asking a GPU for it would wait for all work before.
        """
        self.context = [(keys[:, :, :reach], values[:, :, :reach]) for keys, values in context]
        self.shape = anchors.shape
        is_hidden = torch.arange(reach, device=anchors.device) >= anchors[..., None]
        self.bias = torch.zeros(is_hidden.shape, device=anchors.device).masked_fill_(is_hidden, float("-inf"))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, size = k.shape[1], num_rows // self.shape.numel()
        keys, values = self.context[layer]
        own_keys, own_values = (self._blocks(x, size) for x in (k, v))  # [S, Hkv, N, B, D]
        queries = q.view(*self.shape, size, num_kv_heads, -1, head_dim).permute(0, 3, 1, 4, 2, 5)
        queries = queries.flatten(3, 4) * head_dim**-0.5  # [S, Hkv, N, G * B, D]
        before = (queries.flatten(2, 3) @ keys.transpose(2, 3)).view(*queries.shape[:4], -1)  # [S, Hkv, N, G * B, T]
        own = queries @ own_keys.transpose(3, 4)  # [S, Hkv, N, G * B, B]
        scores = torch.cat((before.float() + self.bias[:, None, :, None], own.float()), dim=-1)
        on_text, on_block = scores.softmax(dim=-1).to(q.dtype).split((keys.shape[2], size), dim=-1)
        out = (on_text.flatten(2, 3) @ values).view(queries.shape) + on_block @ own_values
        out = out.unflatten(3, (-1, size)).permute(0, 2, 4, 1, 3, 5)  # [S, N, B, Hkv, G, D]
        return out.reshape(num_rows, num_heads * head_dim)

    def _blocks(self, x: Tensor, size: int) -> Tensor:
        """[S * N * B, Hkv, D] -> [S, Hkv, N, B, D]."""
        return x.view(*self.shape, size, *x.shape[1:]).permute(0, 3, 1, 2, 4)
