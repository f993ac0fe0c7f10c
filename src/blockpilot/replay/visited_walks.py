"""Fixed chains walked over a finished answer with the drafter alone, drafting only where each of them stands.

Much less work than every anchor where only a sweep of fixed sizes is wanted. The sizes walk side by side, one slot of
the drafter each, exactly as requests do online; the target's part is known already.
"""

from collections.abc import Sequence

import numpy as np

from blockpilot.cache.slots import SlotCache
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.pilots.growth import grow_chain
from blockpilot.replay.finished_text import Reading
from blockpilot.replay.traces import Bytes


def walk_sizes(drafter: DFlashDrafter, reading: Reading, *, sizes: Sequence[int], slots: SlotCache) -> Bytes:
    """Emitted lengths [A, S]; 0 where a chain of that size never stands. `slots` hands out the drafter's slots."""
    emitted = np.zeros((reading.text.num_anchors, len(sizes)), dtype=np.uint8)
    width = slots.num_free
    for start in range(0, len(sizes), width):
        columns = range(start, min(start + width, len(sizes)))
        held = [slots.reserve() for _ in columns]
        try:
            walks = [(slot, sizes[column], emitted[:, column]) for slot, column in zip(held, columns, strict=True)]
            _walk(drafter, reading, walks)
        finally:
            for slot in held:
                drafter.forget(slot)
                slots.free(slot)
    return emitted


def _walk(drafter: DFlashDrafter, reading: Reading, walks: list[tuple[int, int, Bytes]]) -> None:
    text, taps = reading.text, reading.taps
    ids, num_prompt, last = text.ids, len(text.prompt_ids), text.num_anchors
    places = [0] * len(walks)  # answer index of each walk's anchor
    seen = [0] * len(walks)  # tokens its drafter has observed
    while live := [index for index, place in enumerate(places) if place < last]:
        observations, requests = [], []
        for index in live:
            slot, size, _ = walks[index]
            position = num_prompt + places[index]
            observations.append(Observation(slot, ids[seen[index] : position], taps[seen[index] : position]))
            seen[index] = position
            requests.append(
                DraftRequest(
                    slot=slot,
                    anchor_id=ids[position],
                    position=position,
                    block_size=size,
                    num_candidates=1,
                    params=text.params,
                )
            )
        drafter.observe(observations)
        for index, draft in zip(live, drafter.propose(requests), strict=True):
            _, size, column = walks[index]
            chain = grow_chain(draft, text.answer_ids[places[index]], size - 1).token_ids[1:]
            count = _count_emitted(chain, text.answer_ids[places[index] + 1 :])
            column[places[index]] = count
            places[index] += count


def _count_emitted(chain: Sequence[int], following: list[int]) -> int:
    """Accepted tokens and the target's own next one, cut at the answer's end."""
    accepted = 0
    for drafted, true in zip(chain, following, strict=False):
        if drafted != true:
            break
        accepted += 1
    return min(accepted + 1, len(following))
