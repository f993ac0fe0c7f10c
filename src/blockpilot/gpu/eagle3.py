"""EAGLE-3 on a GPU: a greedy chain is one CUDA graph for each shape, and so is observing.

A chain's passes follow each other on the device: the best token and the output of one are the inputs of the next, and
the host waits once, for all of them. Rows that they write behind the context are never kept. Trees and sampling, whose
next pass depends on what the host makes of the last, run unrecorded; so does the first piece of a prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.device import Placement
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.gpu.buckets import (
    CHAIN_BLOCKS,
    CHAIN_OBSERVED,
    MAX_CHAIN_ROWS,
    REQUESTS,
    context_bucket,
    context_buckets,
    round_up,
)
from blockpilot.gpu.device import capture, graph_pool, wait_for
from blockpilot.gpu.fused import FusedEagle3
from blockpilot.gpu.interface import PassInputs
from blockpilot.gpu.plan import Staging
from blockpilot.gpu.views import RecordedViews
from blockpilot.models.eagle3 import Eagle3

ALIGNMENT = 4  # numbers; kernels are compiled once more for inputs that begin elsewhere


class Chain:
    """A chain's passes, one token per request each. Inputs are written on the host and sent in one copy."""

    run: Callable[[], None]

    def __init__(self, num_requests: int, depth: int, context: int, device: torch.device, spare_slot: int) -> None:
        width = -(-num_requests // ALIGNMENT) * ALIGNMENT
        self.staging = Staging(device, token_ids=width, slots=width, starts=depth * width, positions=depth * width)
        found = {name: part.view(-1, width)[:, :num_requests] for name, part in self.staging.device.items()}
        self.anchor_ids, self.slots = found["token_ids"][0], found["slots"][0]
        sees_itself = torch.ones(num_requests, 1, dtype=torch.int32, device=device)
        self.passes = [  # later passes read the tokens that earlier ones find
            PassInputs(self.anchor_ids, positions, self.slots, starts, sees_itself, context=context)
            for positions, starts in zip(found["positions"], found["starts"], strict=True)
        ]
        self._ids, self._slots = (self.staging.host[name] for name in ("token_ids", "slots"))
        self._starts, self._positions = (
            self.staging.host[name].reshape(depth, width) for name in ("starts", "positions")
        )
        self._steps = np.arange(depth, dtype=np.int32)[:, None]
        self._slots[:] = spare_slot
        self._starts[:] = self._positions[:] = self._steps  # what rounds up reads only rows that it wrote itself
        self._blank = self.staging.copy()
        # the best token after every pass and its log-probability, on the host
        self.token_ids, self.log_probs = (
            torch.zeros(num_requests, depth, dtype=dtype, pin_memory=device.type == "cuda")
            for dtype in (torch.int64, torch.float32)
        )

    def write(self, requests: Sequence[DraftRequest], lengths: Sequence[int]) -> None:
        """A chain behind each slot's rows."""
        self.staging.restore(self._blank)
        count = len(requests)
        self._ids[:count] = [request.anchor_id for request in requests]
        self._slots[:count] = [request.slot for request in requests]
        self._starts[:, :count] = self._steps + [lengths[request.slot] for request in requests]
        self._positions[:, :count] = self._steps + [request.position - 1 for request in requests]


class GpuEagle3Drafter(Eagle3Drafter):
    num_spare = 1

    def __init__(self, model: Eagle3, placement: Placement, **options: Any) -> None:
        super().__init__(model, placement, **options)
        self.fused = FusedEagle3(self.model, self.cache.rows)
        self._spare_slot = placement.num_slots
        self._pool = graph_pool(self.device)
        self._chains: dict[tuple[int, int, int], Chain] = {}
        self.views = RecordedViews(
            self.cache, self._store_view, buckets=CHAIN_OBSERVED, max_rows=MAX_CHAIN_ROWS, pool=self._pool
        )

    def bind(self, taps: Tensor) -> None:
        """Say where the target's recorded passes leave their taps: what is observed from there is recorded, too."""
        self.views.taps = taps

    @torch.inference_mode()
    def prepare(self, num_requests: int) -> None:
        """Record chains of the usual sizes, and observing from the target's buffer."""
        rounded = round_up(num_requests, REQUESTS)
        for size in sorted({*CHAIN_BLOCKS, self.block_size}):
            if rounded <= REQUESTS[-1]:
                for context in context_buckets(self.cache.capacity):
                    self._chain(rounded, size - 1, context)
        self.views.prepare(rounded)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Recorded where the fused taps of each slot's last token wait for these: not for the first piece of a text."""
        is_continued = all(one.slot in self._waiting for one in observations)
        if not is_continued or not self.views.observe(observations):
            super().observe(observations)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        is_plain = all(request.num_candidates == 1 and request.params.is_greedy for request in requests)
        if not is_plain or len(requests) > REQUESTS[-1]:
            return super().propose(requests)
        depth = max(request.block_size for request in requests) - 1
        context = context_bucket([self.cache.lengths[request.slot] for request in requests])
        chain = self._chain(round_up(len(requests), REQUESTS), depth, context)
        for request in requests:
            self.cache.append(request.slot, depth)  # is there room?
            self.cache.keep(request.slot, ())
        chain.write(requests, self.cache.lengths)
        chain.run()
        wait_for(self.device)
        return [_draft_of(chain, row, request.block_size - 1) for row, request in enumerate(requests)]

    def _chain(self, num_requests: int, depth: int, context: int) -> Chain:
        key = (num_requests, depth, context)
        if key not in self._chains:
            chain = Chain(num_requests, depth, context, self.device, self._spare_slot)
            chain.run = capture(lambda: self._run_chain(chain), self.device, self._pool)
            self._chains[key] = chain
        return self._chains[key]

    def _run_chain(self, chain: Chain) -> None:
        chain.staging.send()
        for part, place in zip(self._draft(chain), (chain.token_ids, chain.log_probs), strict=True):
            self.fused.layers.kernels.send(part, place)

    def _draft(self, chain: Chain) -> tuple[Tensor, Tensor]:
        """The best token after every pass, and its log-probability, [R, D] each."""
        hidden, ids = self._states.index_select(0, chain.slots), chain.anchor_ids
        found: list[tuple[Tensor, Tensor]] = []
        for inputs in chain.passes:
            hidden, normed = self.fused.forward(self.embed(ids), hidden, inputs)
            logits = self.fused.logits(normed)
            _, best, log_probs = self.fused.layers.kernels.rank_tokens(logits, 1, self.token_ids)  # [R, 1]
            ids = best[:, 0]
            found.append((best, log_probs))
        return torch.cat([best for best, _ in found], dim=1), torch.cat([scores for _, scores in found], dim=1)

    def _store_view(self, taps: Tensor, given: dict[str, Tensor]) -> None:
        """Each token beside the fused taps of the one before it; the last one's wait in their place."""
        slots = given["slots"]
        fused = self.fused.fuse(taps.index_select(0, given["rows"]))  # [R * n, H]
        own = fused.view(len(slots), -1, fused.shape[-1])
        hidden = torch.cat((self._states.index_select(0, slots)[:, None], own[:, :-1]), dim=1).flatten(0, 1)
        self.fused.store_context(self.embed(given["token_ids"]), hidden, given["positions"], slots, given["starts"])
        self._states.index_copy_(0, slots.long(), fused.index_select(0, given["last_rows"]))


def _draft_of(chain: Chain, row: int, depth: int) -> HostDraft:
    """As deep as the request asked for; the buffers are written again."""
    token_ids, log_probs = (part.numpy()[row, :depth, None] for part in (chain.token_ids, chain.log_probs))
    return Draft(token_ids.copy(), np.minimum(log_probs, 0))
