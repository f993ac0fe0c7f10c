"""Prompts that begin as an earlier text did: the rows of that text are taken up where its slot is still free.

The next turn of a chat begins with all that was said before. Its keys and values are the same bits in every pass of an
exact engine, so the answer is the one that reading everything anew would give. What is compared are tokens, generated
ones as they were generated.
"""

from collections.abc import Sequence as Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.cache.slots import SlotCache
from blockpilot.decoding.drafter import Drafter
from blockpilot.engine.sequence import Sequence

LEAST = 16  # tokens; fewer are read anew as fast


class _Held(NamedTuple):
    token_ids: NDArray[np.int64]  # of the rows that a free slot still has
    is_observed: bool  # whether the drafter has seen them all
    use: int  # of the slot; a later one has overwritten its rows


class Prefixes:
    def __init__(self, cache: SlotCache, drafter: Drafter | None) -> None:
        self.cache, self.drafter = cache, drafter
        self._held: dict[int, _Held] = {}  # by slot, the oldest first

    def hold(self, sequence: Sequence) -> None:
        """Before the slot of a request is given back, remember what it has."""
        count = self.cache.lengths[sequence.slot]  # more than there are tokens where an answer ended inside a block
        ids = np.array([*sequence.prompt_ids, *sequence.output_ids][:count], np.int64)
        self._held.pop(sequence.slot, None)
        if len(ids) >= LEAST:
            is_observed = sequence.pilot.num_candidates > 0
            self._held[sequence.slot] = _Held(ids, is_observed, self.cache.uses[sequence.slot])

    def reserve(self, sequence: Sequence) -> int:
        """The slot that has most of the request's prompt, as far as it helps; else the one that is missed least."""
        free = {slot: held for slot, held in self._held.items() if self.cache.holds(slot, held.use)}
        self._held = free
        prompt = np.array(sequence.prompt_ids[:-1], np.int64)  # the last token's logits are always computed
        best, count = None, LEAST - 1
        for slot, held in free.items():
            common = _common(prompt, held.token_ids) if self._suits(sequence, held) else 0
            if common > count:
                best, count = slot, common
        if best is None:
            return self.cache.reserve(avoid=list(free))
        slot = self.cache.reserve(best)
        self.cache.extend(slot, count)
        if sequence.pilot.num_candidates and self.drafter is not None:
            self.drafter.resume(slot, sequence.prompt_ids[:count])
        sequence.num_prefilled = sequence.num_reused = count
        return slot

    def _suits(self, sequence: Sequence, held: _Held) -> bool:
        """A drafter must know as much of the text as the target."""
        if not sequence.pilot.num_candidates or self.drafter is None:
            return True
        return held.is_observed and self.drafter.can_resume


def _common(first: Collection[int] | NDArray[np.int64], second: NDArray[np.int64]) -> int:
    size = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:size]) != second[:size])
    return int(differing[0]) if len(differing) else size
