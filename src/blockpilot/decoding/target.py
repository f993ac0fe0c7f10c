"""Runs the target: packs the tokens of all requests into one pass and reads back logits and taps."""

from collections.abc import Callable
from collections.abc import Sequence as Collection
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.cache.attention import RaggedAttention, Segment
from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.sampling import best_tokens
from blockpilot.models.decoder import Decoder


class PassResult(NamedTuple):
    logits: Tensor  # [rows, V]: every token after a verify, one row per request after a prefill
    taps: Tensor | None  # [N, num_taps * H], all packed tokens of a verify
    row_starts: Collection[int]  # first row of each request
    hidden: Tensor | None = None  # [rows, H], after a prefill: the states that the logits come from
    best: Collection[int] | None = None  # the token of every row, most likely or sampled, where the pass has found it

    def best_ids(self) -> Collection[int]:
        """The most likely token of every row, or what the pass has found. Waits for the device."""
        return best_tokens(self.logits).tolist() if self.best is None else self.best


Show = Callable[[list[Observation]], None]  # is told the tokens of a prefill and their taps, in one piece or several


def show_nobody(observations: list[Observation]) -> None:
    pass


class TargetRunner:
    buckets: tuple[int, ...] = ()  # sizes to which all trees of a check are padded; none: it takes them as they are
    num_spare = 0  # slots for rows that only round up a pass
    is_exact = False  # whether a token's logits are the same bits in every pass

    def __init__(self, decoder: Decoder, placement: Placement) -> None:
        self.decoder, self.device = decoder, placement.device
        self.cache = self._make_cache(placement)

    def _make_cache(self, placement: Placement) -> SlotCache:
        return SlotCache(self.decoder.config, placement, num_open=MAX_TREE_NODES, num_spare=self.num_spare)

    def can_run(self, num_requests: int, num_tokens: int) -> bool:
        """Whether so many trees of that size fit into one pass."""
        return True

    def longest_piece(self, num_requests: int) -> int:
        """Tokens of each prompt that one pass reads."""
        return self.cache.capacity

    @torch.inference_mode()
    def prefill(
        self,
        chunks: Collection[tuple[int, list[int]]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
        show: Show = show_nobody,
    ) -> PassResult:
        """Append prompt chunks (slot, token ids); logits of each chunk's last token. `params` as for `verify`."""
        token_ids = [token_id for _, ids in chunks for token_id in ids]
        positions = [self.cache.lengths[slot] + i for slot, ids in chunks for i in range(len(ids))]
        attend = RaggedAttention(self.cache, [Segment(slot, len(ids)) for slot, ids in chunks])
        hidden, taps = self._forward(token_ids, positions, attend, tap_layers)
        last_rows = torch.tensor([len(ids) for _, ids in chunks], device=self.device).cumsum(0) - 1
        observations, start = [], 0
        for slot, ids in chunks:
            self.cache.keep(slot, range(len(ids)))
            observations.append(Observation(slot, ids, None if taps is None else taps[start : start + len(ids)]))
            start += len(ids)
        show(observations)
        last = hidden[last_rows]
        return PassResult(self.decoder.logits(last), None, range(len(chunks)), last)

    @torch.inference_mode()
    def verify(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
    ) -> PassResult:
        """Run every tree (slot, tree) behind its slot's committed rows; logits of every node, packed in order.

        With the requests' `params` a pass may sample for those that filter nothing; without, all are greedy.
        """
        token_ids = [token_id for _, tree in trees for token_id in tree.token_ids]
        positions = [self.cache.lengths[slot] + depth for slot, tree in trees for depth in tree.depths]
        segments = [Segment(slot, len(tree), None if tree.is_chain else tree.ancestor_matrix()) for slot, tree in trees]
        hidden, taps = self._forward(token_ids, positions, RaggedAttention(self.cache, segments), tap_layers)
        starts = list(accumulate((len(tree) for _, tree in trees), initial=0))[:-1]
        return PassResult(self.decoder.logits(hidden), taps, starts)

    def keep(self, paths: Collection[tuple[int, Collection[int]]]) -> None:
        """Commit the accepted rows (slot, path) of the last pass; the others are forgotten."""
        for slot, path in paths:
            self.cache.keep(slot, path)

    def _forward(
        self, token_ids: list[int], positions: list[int], attend: RaggedAttention, tap_layers: Collection[int]
    ) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor(token_ids, device=self.device)
        return self.decoder(ids, torch.tensor(positions, device=self.device), attend, tap_layers)
