"""Fixed chains walked over a finished answer with the drafter alone, drafting only where each of them stands.

Much less work than every anchor where only a sweep of fixed sizes is wanted. The sizes walk side by side, one slot of
the drafter each, exactly as requests do online; the target's part is known already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blockpilot.cache.slots import SlotCache
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.pilots.growth import grow_chain
from blockpilot.replay.finished_text import Reading
from blockpilot.replay.traces import Bytes


@dataclass
class _Walk:
    slot: int  # of the drafter
    size: int
    emitted: Bytes  # [A], to be filled
    place: int = 0  # answer index of its anchor
    num_seen: int = 0  # tokens its drafter has observed


def walk_sizes(drafter: DFlashDrafter, reading: Reading, *, sizes: Sequence[int], slots: SlotCache) -> Bytes:
    """Emitted lengths [A, S]; 0 where a chain of that size never stands. `slots` hands out the drafter's slots."""
    emitted = np.zeros((reading.text.num_anchors, len(sizes)), dtype=np.uint8)
    width = slots.num_free
    for start in range(0, len(sizes), width):
        columns = range(start, min(start + width, len(sizes)))
        walks = [_Walk(slots.reserve(), sizes[column], emitted[:, column]) for column in columns]
        try:
            while live := [walk for walk in walks if walk.place < reading.text.num_anchors]:
                _step(drafter, reading, live)
        finally:
            for walk in walks:
                drafter.forget(walk.slot)
                slots.free(walk.slot)
    return emitted


def _step(drafter: DFlashDrafter, reading: Reading, walks: Sequence[_Walk]) -> None:
    """One draft of every walk, and on to where the answer confirms it."""
    text, ids, taps = reading.text, reading.text.ids, reading.taps
    observations, requests = [], []
    for walk in walks:
        position = len(text.prompt_ids) + walk.place
        new = slice(walk.num_seen, position)
        observations.append(Observation(walk.slot, ids[new], taps[new]))
        walk.num_seen = position
        request = DraftRequest(walk.slot, ids[position], position, walk.size, num_candidates=1, params=text.params)
        requests.append(request)
    drafter.observe(observations)
    for walk, draft in zip(walks, drafter.propose(requests), strict=True):
        chain = grow_chain(draft, ids[len(text.prompt_ids) + walk.place], walk.size - 1).token_ids[1:]
        following = text.answer_ids[walk.place + 1 :]
        is_right = [drafted == true for drafted, true in zip(chain, following, strict=False)]
        accepted = [*is_right, False].index(False)
        count = min(accepted + 1, len(following))  # with the target's own next token, cut at the answer's end
        walk.emitted[walk.place] = count
        walk.place += count
