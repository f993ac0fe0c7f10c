"""Drafting at every anchor of finished answers, one block size after the other, in batched passes.

The drafter is the one that decodes online, with its packed and rounded weights; `DFlashDrafter.rank` turns logits into
candidates here as there. The blocks of several answers share a pass, cut so that what attention and the head compute
stays within bounds. Results stay on the device, so that passes are enqueued without waiting for one another; they are
copied to the host once, for all answers.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from blockpilot.core.draft import Draft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.replay.anchor_blocks import AnchorAttention, AnchorBlocks, BlockPass
from blockpilot.replay.finished_text import Reading, pad_ids
from blockpilot.replay.traces import ABSENT

# a pass holds a few arrays of this many float32
SCORES_PER_PASS = {"cpu": 1 << 21, "cuda": 1 << 28}  # of attention
LOGITS_PER_PASS = {"cpu": 1 << 24, "cuda": 1 << 28}


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
        scores_per_block = self.drafter.model.config.layers.num_heads * size * (self.ids.shape[1] + size)
        count = max(1, SCORES_PER_PASS[self.drafter.device.type] // scores_per_block)
        for blocks in self.blocks.passes(count):
            yield self._run(blocks, size)[blocks.rows, 1:]

    def _run(self, blocks: BlockPass, size: int) -> Tensor:
        """Hidden states [S * N, B, H] of the blocks of one pass."""
        drafter, places = self.drafter, blocks.anchors
        offsets = torch.arange(size, device=places.device)
        block_ids = torch.full((*places.shape, size), drafter.model.config.mask_token_id, device=places.device)
        block_ids[..., 0] = self.ids[blocks.texts].gather(1, places)
        context = [(keys[blocks.texts], values[blocks.texts]) for keys, values in self.context]
        attend = AnchorAttention(context, places, reach=blocks.reach)
        positions = (places[..., None] + offsets).flatten()
        hidden = drafter.model(drafter.embed(block_ids.flatten()), positions, attend, offsets.repeat(places.numel()))
        return hidden.view(places.numel(), size, -1)

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
