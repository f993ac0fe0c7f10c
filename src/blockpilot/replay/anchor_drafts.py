"""Drafting at every anchor of finished answers, one block size after the other, in batched passes.

The drafter is the one that decodes online, with its packed and rounded weights; `DFlashDrafter.rank` turns logits into
candidates here as there. The blocks of several answers share a pass, cut so that what attention and the head compute
stays within bounds. Results stay on the device, so that passes are enqueued without waiting for one another; they are
copied to the host once, for all answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from blockpilot.core.draft import Draft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.replay.finished_text import FinishedText, Reading, pad_ids
from blockpilot.replay.traces import ABSENT

# a pass holds a few arrays of this many float32
SCORES_PER_PASS = {"cpu": 1 << 21, "cuda": 1 << 28}  # of attention
LOGITS_PER_PASS = {"cpu": 1 << 24, "cuda": 1 << 28}


@dataclass(frozen=True)
class BlockPass:
    texts: slice
    anchors: Tensor  # [S, N], as places in their texts
    reach: int  # the last of them
    rows: Tensor  # [n], which of the S * N blocks are wanted


class AnchorBlocks:
    """Where the blocks of a group of finished texts stand, and which of them share a pass.

    Blocks are numbered text by text, anchor by anchor; all that is computed of them lies in this order. A pass takes
    some texts with all their anchors, or a piece of one text. Within it every text has the same number of blocks: those
    with fewer anchors repeat their last one, and what comes of that is dropped.
    """

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
        split = (x.view(*self.shape, size, num_kv_heads, head_dim) for x in (k, v))
        own_keys, own_values = (x.permute(0, 3, 1, 2, 4) for x in split)  # [S, Hkv, N, B, D]
        queries = q.view(*self.shape, size, num_kv_heads, -1, head_dim).permute(0, 3, 1, 4, 2, 5)
        queries = queries.flatten(3, 4) * head_dim**-0.5  # [S, Hkv, N, G * B, D]
        before = (queries.flatten(2, 3) @ keys.transpose(2, 3)).view(*queries.shape[:4], -1)  # [S, Hkv, N, G * B, T]
        own = queries @ own_keys.transpose(3, 4)  # [S, Hkv, N, G * B, B]
        scores = torch.cat((before.float() + self.bias[:, None, :, None], own.float()), dim=-1)
        on_text, on_block = scores.softmax(dim=-1).to(q.dtype).split((keys.shape[2], size), dim=-1)
        out = (on_text.flatten(2, 3) @ values).view(queries.shape) + on_block @ own_values
        out = out.unflatten(3, (-1, size)).permute(0, 2, 4, 1, 3, 5)  # [S, N, B, Hkv, G, D]
        return out.reshape(num_rows, num_heads * head_dim)


class AnchorDrafts:
    """All blocks of some finished answers, M in number and ordered as `AnchorBlocks` says.

    The answers were written at one temperature, each with a seed of its own.
    """

    @torch.inference_mode()
    def __init__(self, drafter: DFlashDrafter, readings: Sequence[Reading], *, max_size: int) -> None:
        texts = [reading.text for reading in readings]
        self.drafter, self.max_size = drafter, max_size
        self.params = texts[0].params
        self.ids = pad_ids(texts, drafter.device)
        self.blocks = AnchorBlocks(texts, drafter.device)
        self.anchor_ids = self.ids[self.blocks.texts, self.blocks.places]  # [M]
        self.context = self._project([reading.taps for reading in readings])
        self.noise = None if self.params.is_greedy else self._draw([text.params.seed for text in texts])

    @torch.inference_mode()
    def emitted(self, size: int) -> Tensor:
        """Tokens [M] that a chain drafted and checked at `size` emits from every anchor; bytes, on the device."""
        return self._emitted(_join(ranking for ranking, _ in self._rankings(size, num_candidates=1)))

    @torch.inference_mode()
    def record(self, size: int, num_candidates: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The same, and what was offered: `DraftColumns` by name, on the device."""
        rankings, entropies = [], []
        for ranking, logits in self._rankings(size, num_candidates):
            rankings.append(ranking)
            entropies.append(_entropy(logits, self.params))
        joined = _join(rankings)
        return self._emitted(joined), {"entropy": torch.cat(entropies), **self._columns(joined, num_candidates)}

    def _project(self, taps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values [S, Hkv, T, D] of the texts."""
        padded = pad_sequence(taps, batch_first=True)  # [S, T, ...]
        positions = torch.arange(padded.shape[1], device=padded.device).repeat(len(taps))
        layers = self.drafter.project_context(padded.flatten(0, 1), positions)
        grids = [[x.unflatten(0, padded.shape[:2]).transpose(1, 2).contiguous() for x in pair] for pair in layers]
        return [(keys, values) for keys, values in grids]

    def _draw(self, seeds: list[int]) -> Tensor:
        """Noise of the tokens behind the anchors, text by text: each has max_size - 2 rows more than blocks."""
        counts, surplus = self.blocks.counts, self.max_size - 2
        noise = torch.empty(sum(counts) + len(counts) * surplus, self._head_size, device=self.drafter.device)
        start = 0
        for seed, first, count in zip(seeds, self.blocks.firsts, counts, strict=True):
            end = start + count + surplus
            noise[start:end] = self.drafter.noise(seed, range(first + 1, first + 1 + count + surplus))
            start = end
        return noise

    @property
    def _head_size(self) -> int:
        reduced = self.drafter.token_ids
        return self.drafter.model.config.layers.vocab_size if reduced is None else len(reduced)

    def _rankings(self, size: int, num_candidates: int) -> Iterator[tuple[Draft[Tensor], Tensor]]:
        """Ranking and logits [n, D, V] of all blocks in order, some at a time."""
        count = max(1, LOGITS_PER_PASS[self.drafter.device.type] // (self._head_size * (size - 1)))
        start = 0
        for hidden in self._hidden(size):
            for part in hidden.split(count):
                blocks = slice(start, start + len(part))
                logits = self.drafter.head(part.flatten(0, 1)).unflatten(0, part.shape[:2])
                ranking = self.drafter.rank(
                    part,
                    logits,
                    anchor_ids=self.anchor_ids[blocks],
                    temperature=self.params.temperature,
                    noise=self._noise(blocks, size - 1),
                    num_candidates=num_candidates,
                )
                yield ranking, logits
                start = blocks.stop

    def _hidden(self, size: int) -> Iterator[Tensor]:
        """Hidden states [n, D, H] behind the anchors of all blocks in order, pass by pass."""
        drafter = self.drafter
        scores_per_block = drafter.model.config.layers.num_heads * size * (self.ids.shape[1] + size)
        count = max(1, SCORES_PER_PASS[drafter.device.type] // scores_per_block)
        offsets = torch.arange(size, device=drafter.device)
        for blocks in self.blocks.passes(count):
            places = blocks.anchors  # [S, N]
            block_ids = torch.full((*places.shape, size), drafter.model.config.mask_token_id, device=places.device)
            block_ids[..., 0] = self.ids[blocks.texts].gather(1, places)
            embeddings, positions = drafter.embed(block_ids.flatten()), (places[..., None] + offsets).flatten()
            context = [(keys[blocks.texts], values[blocks.texts]) for keys, values in self.context]
            attend = AnchorAttention(context, places, reach=blocks.reach)
            hidden = drafter.model(embeddings, positions, attend, offsets.repeat(places.numel()))
            yield hidden.view(places.numel(), size, -1)[blocks.rows, 1:]

    def _noise(self, blocks: slice, num_depths: int) -> Tensor | None:
        """Noise [n, D, V] of the tokens behind some anchors."""
        if self.noise is None:
            return None
        steps = torch.arange(blocks.start, blocks.stop, device=self.noise.device)
        rows = steps + self.blocks.texts[blocks] * (self.max_size - 2)
        return self.noise[rows[:, None] + torch.arange(num_depths, device=rows.device)]

    def _labels(self, num_depths: int) -> Tensor:
        """The answers' own tokens [M, D] behind each anchor; -1 beyond their ends."""
        depths = torch.arange(1, num_depths + 1, device=self.ids.device)
        places = (self.blocks.places[:, None] + depths).clamp(max=self.ids.shape[1] - 1)
        return self.ids[self.blocks.texts[:, None], places].masked_fill(depths > self.blocks.remaining[:, None], -1)

    def _emitted(self, ranking: Draft[Tensor]) -> Tensor:
        chain = _chain_tokens(ranking)
        accepted = (chain == self._labels(chain.shape[1])).cumprod(dim=-1).sum(dim=-1)
        return torch.minimum(accepted + 1, self.blocks.remaining).to(torch.uint8)

    def _columns(self, ranking: Draft[Tensor], num_candidates: int) -> dict[str, Tensor]:
        shown = ranking.token_ids[..., :num_candidates]
        is_true = shown == self._labels(shown.shape[1])[..., None]
        true_ranks = is_true.int().argmax(dim=-1).masked_fill(~is_true.any(dim=-1), ABSENT)
        columns = {"log_probs": ranking.log_probs[..., :num_candidates], "true_ranks": true_ranks.to(torch.uint8)}
        if ranking.first is not None and ranking.pairwise is not None:
            columns["first"] = ranking.first[:, :num_candidates]
            columns["pairwise"] = ranking.pairwise[..., :num_candidates, :num_candidates]
        return {name: column.contiguous() for name, column in columns.items()}  # what is not shown need not be kept


def _join(rankings: Iterable[Draft[Tensor]]) -> Draft[Tensor]:
    """The rankings of blocks one after the other as one."""
    columns = zip(*(ranking.arrays for ranking in rankings), strict=True)
    ids, log_probs, first, pairwise = (None if column[0] is None else torch.cat(column) for column in columns)
    assert ids is not None and log_probs is not None
    return Draft(ids, log_probs, first, pairwise)


def _chain_tokens(ranking: Draft[Tensor]) -> Tensor:
    """The chain that would be checked [N, D]: at every depth the likeliest child of the one chosen before."""
    if ranking.first is None or ranking.pairwise is None:
        return ranking.token_ids[..., 0]
    ranks = [ranking.first.argmax(dim=-1)]
    rows = torch.arange(len(ranking.first), device=ranking.first.device)
    for depth in range(ranking.pairwise.shape[1]):
        ranks.append(ranking.pairwise[rows, depth, ranks[-1]].argmax(dim=-1))
    return ranking.token_ids.gather(-1, torch.stack(ranks, dim=1)[..., None])[..., 0]


def _entropy(logits: Tensor, params: SamplingParams) -> Tensor:
    """Entropy [...] of logits [..., V] at the request's temperature (1 where it is greedy)."""
    scores = logits.float() if params.is_greedy else logits.float() / params.temperature
    log_mass = scores.logsumexp(dim=-1)
    return log_mass - ((scores - log_mass[..., None]).exp_() * scores).sum(dim=-1)
