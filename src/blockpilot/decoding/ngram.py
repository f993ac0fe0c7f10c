"""Prompt lookup: draft what followed the last time the same words stood there. Needs no weights.

Every observed n-gram of 1 to `max_ngram` tokens is indexed by where it last ended, so both observing a token and
proposing a block cost a few dictionary look-ups, whatever the context's length.
"""

import math
from collections.abc import Sequence

import numpy as np

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.decoding.drafter import DraftRequest, Observation

_HIT_LOG_PROB = math.log(0.6)  # a fixed guess: copies carry no probability of their own


class NgramDrafter:
    name = "ngram"
    tap_layers: tuple[int, ...] = ()
    block_size = 8
    max_block_size = MAX_BLOCK_SIZE
    can_resume = True

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            tokens = self._tokens.setdefault(observation.slot, [])
            ends = self._ends.setdefault(observation.slot, {})
            for token_id in observation.token_ids:
                tokens.append(token_id)
                for size in range(1, min(self.max_ngram, len(tokens)) + 1):
                    ends[tuple(tokens[-size:])] = len(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        return [self._propose_one(request) for request in requests]

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        self.observe([Observation(slot, token_ids, None)])

    def forget(self, slot: int) -> None:
        self._tokens.pop(slot, None)
        self._ends.pop(slot, None)

    def _propose_one(self, request: DraftRequest) -> HostDraft:
        drafted = self._continuation(request)[: request.block_size - 1]
        ids = np.array(drafted, dtype=np.int64).reshape(-1, 1)
        return Draft(ids, np.full(ids.shape, _HIT_LOG_PROB, dtype=np.float32))

    def _continuation(self, request: DraftRequest) -> list[int]:
        tokens = self._tokens.get(request.slot, [])
        ends = self._ends.get(request.slot, {})
        history = [*tokens[-self.max_ngram + 1 :], request.anchor_id] if self.max_ngram > 1 else [request.anchor_id]
        for size in range(len(history), 0, -1):
            end = ends.get(tuple(history[-size:]))
            if end is not None:
                return [*tokens[end : end + request.block_size], request.anchor_id]
        return []
