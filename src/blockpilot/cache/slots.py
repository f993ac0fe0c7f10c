"""KV memory as slots: one row of keys and values per token, one slot per request.

A slot knows two lengths. Rows below `lengths[slot]` are committed; a pass appends rows behind them, and `keep` decides
which of those survive: the accepted path is gathered into contiguous rows and everything else is forgotten. That is the
only rollback of the target; a drafter that looks ahead step by step keeps its rows and takes them back with `rewind`.
A finished request gives its slot back with `free`.
"""

from collections.abc import Sequence
from operator import ge

import torch
from torch import Tensor

from blockpilot.core.device import Placement
from blockpilot.core.errors import BlockPilotError
from blockpilot.models.config import DecoderConfig


class SlotCache:
    def __init__(self, layers: DecoderConfig, placement: Placement, *, num_open: int, num_spare: int = 0) -> None:
        """A slot has room for a whole context and `num_open` rows of a pass behind it.

        `num_spare` slots more are never reserved: passes of a fixed shape let rows that nobody wants write there.
        """
        num_slots, self.capacity = placement.num_slots, placement.context_length + num_open
        shape = (layers.num_layers, 2, num_slots + num_spare, layers.num_kv_heads, self.capacity, layers.head_dim)
        # untouched pages cost no memory on a CPU
        self.rows = torch.empty(shape, dtype=placement.dtype, device=placement.device)
        self.lengths = [0] * num_slots
        self.appended = [0] * num_slots
        self.uses = [0] * num_slots  # how often each has been reserved
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, slot: int | None = None, *, avoid: Sequence[int] = ()) -> int:
        """A free slot: this one, or any; those to be avoided last, in their order."""
        if not self._free:
            raise BlockPilotError("no free KV slot: the scheduler admitted too many requests")
        if slot is None and avoid:
            slot = next((one for one in reversed(self._free) if one not in avoid), avoid[0])
        if slot is None:
            slot = self._free.pop()
        else:
            self._free.remove(slot)
        self.reset(slot)
        self.uses[slot] += 1
        return slot

    def holds(self, slot: int, use: int) -> bool:
        """Whether a slot is free and nobody has reserved it since that use: its rows are as they were."""
        return slot in self._free and self.uses[slot] == use

    def free(self, slot: int) -> None:
        if slot in self._free:
            raise BlockPilotError(f"KV slot {slot} was freed twice")
        self.reset(slot)
        self._free.append(slot)

    def reset(self, slot: int) -> None:
        """Forget every row of a slot. For caches whose slots are handed out elsewhere (a drafter's context)."""
        self.lengths[slot] = self.appended[slot] = 0

    def append(self, slot: int, count: int) -> int:
        """Open `count` rows behind the committed ones and return the first; earlier open rows are dropped."""
        start = self.lengths[slot]
        if start + count > self.capacity:
            raise BlockPilotError(f"KV slot {slot} holds {self.capacity} rows; {start} + {count} do not fit")
        self.appended[slot] = count
        return start

    def write(self, layer: int, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [n, H, D] in the open rows; return all filled keys and values, each [1, H, filled, D]."""
        start = self.lengths[slot]
        filled = start + k.shape[0]
        keys_values = self.rows[layer, :, slot]  # [2, H, capacity, D]
        keys_values[0, :, start:filled].copy_(k.transpose(0, 1))
        keys_values[1, :, start:filled].copy_(v.transpose(0, 1))
        return keys_values[0:1, :, :filled], keys_values[1:2, :, :filled]

    def keep(self, slot: int, path: Sequence[int], *, is_moved: bool = False) -> None:
        """Commit the open rows named by `path` (ascending indices into them), in that order; forget the others.

        `is_moved`: the rows have been gathered already, or will be before anyone reads them.
        """
        start, num_open = self.lengths[slot], self.appended[slot]
        if path and (path[0] < 0 or path[-1] >= num_open or any(map(ge, path, path[1:]))):
            raise BlockPilotError(f"KV slot {slot} has {num_open} open rows; {list(path)} is no ascending path in them")
        if not is_moved and not is_contiguous(path):
            self._gather(slot, start, path)
        self.lengths[slot] = start + len(path)
        self.appended[slot] = 0

    def _gather(self, slot: int, start: int, path: Sequence[int]) -> None:
        source = torch.tensor(path, device=self.rows.device) + start
        slot_rows = self.rows[:, :, slot]  # [L, 2, H, capacity, D]
        slot_rows[..., start : start + len(path), :] = slot_rows.index_select(3, source)

    def extend(self, slot: int, count: int) -> int:
        """Commit `count` rows behind the others at once, filled or to be filled; returns the first."""
        start = self.append(slot, count)
        self.lengths[slot], self.appended[slot] = start + count, 0
        return start

    def store(self, slots: Sequence[int], counts: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Commit rows that are known at once: keys and values [sum of counts, H, D] of every layer, slot after slot."""
        start = 0
        for slot, count in zip(slots, counts, strict=True):
            self.append(slot, count)
            for index, (keys, values) in enumerate(layers):
                self.write(index, slot, keys[start : start + count], values[start : start + count])
            self.keep(slot, range(count))
            start += count

    def copy_rows(self, slot: int, start: int, end: int) -> Tensor:
        """Keys and values [layers, 2, H, end - start, D] of a slot."""
        return self.rows[:, :, slot, :, start:end].clone()

    def rewind(self, slot: int, length: int) -> None:
        """Forget every row behind the first `length`: what a drafter kept while it looked ahead."""
        if not 0 <= length <= self.lengths[slot]:
            raise BlockPilotError(f"KV slot {slot} has {self.lengths[slot]} rows and cannot go back to {length}")
        self.lengths[slot], self.appended[slot] = length, 0


def is_contiguous(path: Sequence[int]) -> bool:
    """Whether the rows of an ascending path from 0 lie where they belong."""
    return not path or path[-1] == len(path) - 1
