"""Where the blocks of a group of finished texts stand, which of them share a pass, and what they see.

Blocks are numbered text by text, anchor by anchor; all that is computed of them lies in this order. A pass takes some
texts with all their anchors, or a piece of one text. Within it every text has the same number of blocks: those with
fewer anchors repeat their last one, and what comes of that is dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.replay.finished_text import FinishedText


@dataclass(frozen=True)
class BlockPass:
    texts: slice
    anchors: Tensor  # [S, N], as places in their texts
    reach: int  # the last of them
    rows: Tensor  # [n], which of the S * N blocks are wanted


class AnchorBlocks:
    def __init__(self, texts: Sequence[FinishedText], device: torch.device) -> None:
        self.num_anchors = [text.num_anchors for text in texts]
        self.counts = [max(1, count) for count in self.num_anchors]  # without an anchor one block still tells shapes
        self.starts = list(accumulate(self.counts, initial=0))  # number of each text's first block; of all at the end
        self.firsts = [len(text.prompt_ids) for text in texts]  # place of each text's first anchor
        columns = [
            (row, anchor, self.firsts[row] + anchor, self.num_anchors[row] - anchor)
            for row, count in enumerate(self.counts)
            for anchor in range(count)
        ]
        # per block [M]: its text, its anchor as an answer index and as a place in the text, answer tokens behind it
        self.texts, self.anchors, self.places, self.remaining = torch.tensor(columns, device=device).t().contiguous()
        bounds = [(first, first + count - 1) for first, count in zip(self.firsts, self.counts, strict=True)]
        self._bounds = torch.tensor(bounds, device=device)  # [S, 2], first and last anchor

    def passes(self, num_blocks: int) -> Iterator[BlockPass]:
        """All blocks in order, about `num_blocks` at a time."""
        num_texts = max(1, num_blocks // max(self.counts))
        for start in range(0, len(self.counts), num_texts):
            texts = range(start, min(start + num_texts, len(self.counts)))
            width = max(self.counts[row] for row in texts)
            for first in range(0, width, num_blocks):
                yield self._pass(texts, range(first, min(first + num_blocks, width)))

    def split(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """What was found of every block [M, ...], text by text [A, ...]."""
        return [column[start : start + count] for start, count in zip(self.starts[:-1], self.num_anchors, strict=True)]

    def _pass(self, texts: range, anchors: range) -> BlockPass:
        own = slice(texts.start, texts.stop)
        firsts, lasts = self._bounds[own, :1], self._bounds[own, 1:]  # [S, 1]
        steps = torch.arange(anchors.start, anchors.stop, device=firsts.device)
        ends = [min(anchors.stop, self.counts[row]) for row in texts]
        blocks = slice(self.starts[texts.start] + anchors.start, self.starts[texts.stop - 1] + ends[-1])
        return BlockPass(
            texts=own,
            anchors=torch.minimum(firsts + steps, lasts),
            reach=max(self.firsts[row] + end - 1 for row, end in zip(texts, ends, strict=True)),
            rows=(self.texts[blocks] - texts.start) * len(anchors) + self.anchors[blocks] - anchors.start,
        )


class AnchorAttention:
    """Attention of the blocks of a pass, by the same `attend` contract as the engine's.

    A block sees its text strictly before its anchor, and itself, both ways. All blocks of a text share its keys, so
    scores against the texts are one batched matrix product and nothing is copied per block.
    """

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
