"""Drafting with EAGLE-3: token by token, each pass continuing the drafter's own hidden state.

Context row i of a slot is the pair (embedding of token i + 1, fused taps of token i) at rotary position i. A row
therefore needs the token after it: the last observed token's fused taps wait in `_states` until the next observation,
or until drafting starts, where the anchor is that token. With the anchor at position p

    observed        tokens 0 .. p-1       context rows 0 .. p-2, taps of p-1 waiting
    first pass      (anchor, taps p-1) at rotary position p-1, predicts depth 1
    pass d + 1      (token of depth d, output of its parent's row) at rotary position p-1+d, predicts depth d + 1

Rows of draft passes stay in the cache until the proposal is complete and are taken back then; the first pair is made
again from the same inputs when the anchor is observed. All requests of a step share every pass, chains and trees alike.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockpilot.cache.attention import RaggedAttention, Segment
from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_EAGLE3_BLOCK_SIZE
from blockpilot.core.device import Placement
from blockpilot.core.draft import HostDraft
from blockpilot.decoding.drafter import DraftRequest, Observation, join_taps
from blockpilot.decoding.eagle3_growth import GrowingTree
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.noise import gumbel_noise
from blockpilot.models.packing import pack_linears, quantize_linears

BLOCK_SIZE = 8


class Eagle3Drafter:
    block_size, max_block_size = BLOCK_SIZE, MAX_EAGLE3_BLOCK_SIZE
    can_resume = False
    num_spare = 0  # slots for rows that only round up a pass

    def __init__(
        self,
        model: Eagle3,
        placement: Placement,
        *,
        embed: Callable[[Tensor], Tensor],
        name: str = "eagle3",
        tree_width: int = 8,
        tree_children: int = 8,
    ) -> None:
        """`embed` is the target's embedding, used unless the checkpoint has its own.

        Trees expand the `tree_width` best nodes of each depth into `tree_children` children each.
        """
        self.name = name
        self.tap_layers = model.config.tap_layers
        self.tree_width, self.tree_children = tree_width, tree_children
        self.model, self.device = model, placement.device
        self.embed = embed if model.embed_tokens is None else model.embed_tokens
        self.token_ids = model.draft_token_ids.to(self.device)
        if placement.linear_backend == "int8":
            quantize_linears(model)
        pack_linears(model, placement.linear_backend)
        layers, num_open = model.config.layers, 1 + (MAX_EAGLE3_BLOCK_SIZE - 2) * tree_width
        self.cache = SlotCache(layers, placement, num_open=num_open, num_spare=self.num_spare)
        num_states = placement.num_slots + self.num_spare
        self._states = torch.zeros(num_states, layers.hidden_size, dtype=placement.dtype, device=self.device)
        self._waiting: set[int] = set()  # slots whose row of `_states` is the fused taps of their last observed token

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        taps = join_taps(observations)
        fused = self.model.fuse(taps)
        hidden: list[Tensor] = []
        ids: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        start = 0
        for observation in observations:
            slot, length = observation.slot, len(observation.token_ids)
            is_first = slot not in self._waiting
            own = fused[start : start + length]
            hidden += [own[:-1]] if is_first else [self._state(slot), own[:-1]]
            counts.append(length - is_first)
            ids += observation.token_ids[length - counts[-1] :]
            positions += range(self.cache.lengths[slot], self.cache.lengths[slot] + counts[-1])
            start += length
        if ids:
            packed = torch.tensor([ids, positions], device=self.device)
            rows = self.model.keys_values(self.embed(packed[0]), torch.cat(hidden), packed[1])
            self.cache.store([observation.slot for observation in observations], counts, [rows])
        self._wait(observations, fused)  # last: what waited until now has been read

    def _state(self, slot: int) -> Tensor:
        return self._states[slot : slot + 1]

    def _wait(self, observations: Sequence[Observation], fused: Tensor) -> None:
        """The fused taps of each slot's last token wait for the token after it."""
        end = 0
        for observation in observations:
            end += len(observation.token_ids)
            self._state(observation.slot).copy_(fused[end - 1 : end])
            self._waiting.add(observation.slot)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        trees = [GrowingTree(r, width=self.tree_width, num_children=self.tree_children) for r in requests]
        lengths = [self.cache.lengths[request.slot] for request in requests]
        growing = trees
        hidden = torch.cat([self._state(request.slot) for request in requests])
        starts = list(range(len(requests)))  # where each growing tree's rows begin in `hidden`
        try:
            while growing:
                hidden = self._run(growing, hidden, starts)
                starts = self._grow(growing, hidden)
                starts = [start for start, tree in zip(starts, growing, strict=True) if tree.is_growing]
                growing = [tree for tree in growing if tree.is_growing]
        finally:
            for request, length in zip(requests, lengths, strict=True):
                self.cache.rewind(request.slot, length)
        return [tree.draft() for tree in trees]

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        raise AssertionError("the taps of the last token are not kept")

    def forget(self, slot: int) -> None:
        self.cache.reset(slot)
        self._waiting.discard(slot)

    def _run(self, trees: Sequence[GrowingTree], hidden: Tensor, starts: Sequence[int]) -> Tensor:
        """One pass over the frontiers of all trees, packed; its rows stay in the cache."""
        ids = [token_id for tree in trees for token_id in tree.frontier_ids]
        positions = [tree.request.position - 1 + tree.depth for tree in trees for _ in tree.frontier]
        sources = [start + row for tree, start in zip(trees, starts, strict=True) for row in tree.parent_rows]
        segments = [
            Segment(tree.request.slot, len(tree.frontier), None if tree.is_chain else tree.ancestors())
            for tree in trees
        ]
        packed = torch.tensor([ids, positions, sources], device=self.device)
        attend = RaggedAttention(self.cache, segments)
        output = self.model(self.embed(packed[0]), hidden[packed[2]], packed[1], attend)
        for tree in trees:
            self.cache.keep(tree.request.slot, range(len(tree.frontier)))
        return output

    def _grow(self, trees: Sequence[GrowingTree], hidden: Tensor) -> list[int]:
        """Rank the tokens after every frontier node and hand them to its tree; returns where each tree's rows begin."""
        counts = [len(tree.frontier) for tree in trees]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        scores = self.model.logits(hidden).float()  # [N, draft vocab]
        for tree, start, count in zip(trees, starts, counts, strict=True):
            params = tree.request.params
            if not params.is_greedy:
                noise = self._noise(params.seed, tree.request.position + 1 + tree.depth)
                scores[start : start + count] = scores[start : start + count] / params.temperature + noise
        width = min(max(tree.request.num_candidates for tree in trees), scores.shape[-1])
        best = scores.topk(width, dim=-1)
        log_probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).clamp_(max=0).cpu().numpy()
        token_ids = self.token_ids[best.indices].cpu().numpy()
        for tree, start, count in zip(trees, starts, counts, strict=True):
            rows, columns = slice(start, start + count), slice(tree.request.num_candidates)
            tree.grow(token_ids[rows, columns], log_probs[rows, columns])
        return starts

    def _noise(self, seed: int, position: int) -> Tensor:
        """The target's own noise [1, draft vocab] for the token at `position`, of the tokens this drafter knows."""
        vocab_size = self.model.config.layers.vocab_size
        return gumbel_noise(seed, [position], vocab_size=vocab_size, device=self.device)[:, self.token_ids]
