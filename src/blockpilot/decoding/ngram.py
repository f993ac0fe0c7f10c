"""Prompt lookup as a drafter of its own: the chain that followed the last time the same words stood there."""

import math
from collections.abc import Sequence

import numpy as np

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.draft import NO_DRAFT, Draft, HostDraft
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.lookup import Lookup

_HIT_LOG_PROB = math.log(0.6)  # for pilots that take scores at their word


class NgramDrafter:
    name = "ngram"
    tap_layers: tuple[int, ...] = ()
    block_size = 8
    max_block_size = MAX_BLOCK_SIZE
    can_resume = True

    def __init__(self) -> None:
        self._lookups: dict[int, Lookup] = {}  # by slot

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self.resume(observation.slot, observation.token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        return [self._propose_one(request) for request in requests]

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        self._lookups.setdefault(slot, Lookup()).push(token_ids)

    def forget(self, slot: int) -> None:
        self._lookups.pop(slot, None)

    def _propose_one(self, request: DraftRequest) -> HostDraft:
        lookup = self._lookups.get(request.slot)
        copy = None if lookup is None else lookup.find(request.anchor_id, request.block_size - 1)
        if copy is None:
            return NO_DRAFT
        ids = np.array(copy.token_ids, dtype=np.int64).reshape(-1, 1)
        return Draft(ids, np.full(ids.shape, _HIT_LOG_PROB, dtype=np.float32))
