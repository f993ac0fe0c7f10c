"""A DFlash drafter on a CPU in 8-bit integers: observing and drafting are one compiled call each."""

import ctypes
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.device import Placement
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.cpu.cache import PackedCache
from blockpilot.cpu.layers import PackedLayers, weight_of
from blockpilot.cpu.target import add_sampling
from blockpilot.cpu.tokens import Columns, Tokens
from blockpilot.cpu.unseen import Unseen
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation, join_taps
from blockpilot.models.decoder import DecoderLayer
from blockpilot.models.dflash import DFlash
from blockpilot.models.packing import require_kernels
from blockpilot.native.library import MAX_RANKED, RankingData, ShownData, WantedData, WeightData, address

MOST_UNSEEN = 48 * 2**20  # bytes of taps: 4,000 tokens of the default model


class CpuDFlashDrafter(DFlashDrafter):
    """Tokens that come one by one, as in plain decoding, are looked at together before the next draft, and so are
    prompts of requests that will not draft at once: who does not draft pays nothing for being able to."""

    cache: PackedCache

    def __init__(
        self,
        model: DFlash,
        placement: Placement,
        *,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        name: str = "dflash",
    ) -> None:
        self.kernels = require_kernels()
        super().__init__(model, placement, embed=embed, head=head, name=name)
        config = model.config
        layers, norm = [cast(DecoderLayer, layer) for layer in model.layers], model.norm
        convolution = config if config.conv_kernel_size else None
        self.layers = PackedLayers(layers, norm, model.rotary, config.layers, self.cache.capacity + 1, convolution)
        self._embedding, self._space = cast(nn.Embedding, embed).weight.data_ptr(), self.kernels.open_space()
        self._head_ids = None if self.token_ids is None else self.token_ids.to(torch.int32).contiguous()
        self._features, self._projection = weight_of(model.fc), weight_of(self.context_projection)
        self._room = [np.empty(0, np.float32)] * 4
        self._unseen = Unseen()  # taps of tokens that are still to be looked at
        self._forgotten: dict[int, int] = {}  # slots that may be resumed, and how many rows they have seen
        self._shown = ShownData(  # what is always the same
            features=ctypes.pointer(self._features),
            norm=address(model.hidden_norm.weight),
            projection=ctypes.pointer(self._projection),
        )
        self._ranking = RankingData(token_ids=address(self._head_ids))
        if (selector := model.candidate_selector) is not None:
            self._ranking.rank = selector.rank
            self._ranking.parents = selector.predecessor_codebook.data_ptr()
            self._ranking.children = selector.successor_codebook.data_ptr()
            self._ranking.projection = ctypes.pointer(weight_of(selector.hidden_projection))

    def _make_cache(self, placement: Placement) -> SlotCache:
        return PackedCache(self.model.config.layers, placement, self.kernels, num_open=MAX_BLOCK_SIZE)

    def observe(self, observations: Sequence[Observation]) -> None:
        at_once: list[Observation] = []
        for one in observations:
            if self._forgotten.pop(one.slot, None) is not None:
                self._unseen.take(one.slot)  # of the text before
            if len(one.token_ids) > 1 and not one.can_wait and one.slot not in self._unseen:
                at_once.append(one)
            elif (taps := one.own_taps()) is not None:
                self._unseen.add(one.slot, taps.clone() if one.rows is None else taps)  # a pass's room is used again
        self._show(at_once)
        while self._unseen.num_bytes >= MOST_UNSEEN:
            self._see_largest()

    def forget(self, slot: int) -> None:
        self._forgotten[slot] = self.cache.lengths[slot]  # its rows may be taken up again, and what follows them
        super().forget(slot)

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        num_seen = min(self._forgotten.pop(slot, len(token_ids)), len(token_ids))
        super().resume(slot, token_ids[:num_seen])
        if (taps := self._unseen.take(slot)) is not None and num_seen < len(token_ids):
            self._unseen.add(slot, taps[: len(token_ids) - num_seen])

    def _see(self, slots: Sequence[int]) -> None:
        """Look at what has been put off."""
        found = [(slot, taps) for slot in slots if (taps := self._unseen.take(slot)) is not None]
        self._show([Observation(slot, range(len(taps)), taps) for slot, taps in found])

    def _see_largest(self) -> None:
        slot = self._unseen.largest()
        if (num_seen := self._forgotten.get(slot)) is None:
            self._see([slot])
            return
        self.cache.extend(slot, num_seen)
        self._see([slot])
        self.forget(slot)

    def _show(self, observations: Sequence[Observation]) -> None:
        if not observations:
            return
        taps, rows = _shared_taps(observations)
        slots: list[int] = []
        places: list[int] = []
        for one in observations:
            count, start = len(one.token_ids), self.cache.append(one.slot, len(one.token_ids))
            slots += [one.slot] * count
            places += range(start, start + count)
        columns, shown = Columns(rows, places, slots), self._shown
        shown.rows, shown.stored, shown.slots = columns.addresses
        shown.positions, shown.count = shown.stored, len(rows)
        shown.taps, shown.size = taps.data_ptr(), taps.shape[1]
        self.kernels.show(self.layers.data, self.cache.data, shown)
        for one in observations:
            self.cache.keep(one.slot, range(len(one.token_ids)))

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        self._see([one.slot for one in requests])
        head, selector, shapes = self._head(), self.model.candidate_selector, self.layers.data
        width = self.model.config.selector_top_k if selector else max(one.num_candidates for one in requests)
        width = min(width, head.rows)
        if width > MAX_RANKED:
            raise AssertionError(f"{width} candidates of a position, and there is room for {MAX_RANKED}")
        tokens = Tokens()
        offsets: list[int] = []
        depths: list[int] = []
        rows: list[int] = []  # that are ranked
        starts: list[int] = []
        mask_id = self.model.config.mask_token_id
        for one in requests:
            size, first = one.block_size, len(tokens)
            starts.append(len(rows))
            tokens.add_block(
                one.slot, self.cache.append(one.slot, size), [one.anchor_id] + [mask_id] * (size - 1), one.position
            )
            offsets += range(size)
            depths += range(size - 1)
            rows += range(first + 1, first + size)  # the anchors have nothing to say
        each = [one for one in requests for _ in range(one.block_size - 1)]
        anchors = [one.anchor_id for one in each]
        followers = [one.position + 1 + depth for one, depth in zip(each, depths, strict=True)]
        group = shapes.num_heads // shapes.num_kv
        batch, columns = tokens.describe(self._embedding, group, offsets, depths, rows, anchors, followers)
        *_, batch.offsets, depth_column, row_column, anchor_column, follower_column = columns.addresses
        best = _Best(len(rows), width, is_paired=selector is not None)
        ranking = self._ranking
        ranking.num_best, ranking.depths, ranking.anchor_ids = width, depth_column, anchor_column
        ranking.best_ids, ranking.log_probs, ranking.pairs = map(address, (best.ids, best.log_probs, best.pairs))
        self._make_room(len(rows), width, head.rows)
        wanted = WantedData(count=len(rows), rows=row_column, head=ctypes.pointer(head), logits=ranking.scores)
        wanted.places = follower_column
        kept = add_sampling(wanted, [one.params for one in each])
        self.kernels.forward(self._space, shapes, self.cache.data, batch, wanted, ranking)
        del kept
        return [best.draft(start, one) for start, one in zip(starts, requests, strict=True)]

    def _head(self) -> WeightData:
        return weight_of(getattr(self.head, "layer", self.head))  # type: ignore[arg-type]

    def _make_room(self, count: int, width: int, num_scores: int) -> None:
        """For what is computed on the way, kept from draft to draft."""
        sizes = count * self.layers.data.hidden, count * num_scores, count * width, count * self._ranking.rank
        if any(len(room) < size for room, size in zip(self._room, sizes, strict=True)):
            self._room = [
                np.empty(max(size, len(room)), np.float32) for size, room in zip(sizes, self._room, strict=True)
            ]
            ranking = self._ranking
            ranking.normed, ranking.scores, ranking.values, ranking.gates = map(address, self._room)


class _Best:
    """What a draft of `count` positions leaves."""

    def __init__(self, count: int, width: int, *, is_paired: bool) -> None:
        self.ids = np.empty((count, width), np.int64)
        self.log_probs = np.empty((count, width), np.float32)
        self.pairs = np.empty((count, width, width), np.float32) if is_paired else None

    def draft(self, start: int, request: DraftRequest) -> HostDraft:
        rows = slice(start, start + request.block_size - 1)
        first = pairs = None
        if self.pairs is not None:
            first, pairs = self.pairs[start, 0], self.pairs[start + 1 : rows.stop]
        found = Draft(self.ids[rows], self.log_probs[rows], first, pairs)
        return found.cut(request.block_size - 1, request.num_candidates)


def _shared_taps(observations: Sequence[Observation]) -> tuple[Tensor, list[int]]:
    """Taps, and the rows of the observed tokens in them."""
    first = observations[0]
    if first.taps is not None and all(one.taps is first.taps and one.rows is not None for one in observations):
        return first.taps, [row for one in observations for row in one.rows or ()]
    taps = join_taps(observations).contiguous()
    return taps, list(range(len(taps)))
