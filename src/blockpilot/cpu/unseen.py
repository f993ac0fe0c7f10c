"""Taps that a drafter will look at later, if its request ever drafts."""

import torch
from torch import Tensor


class Unseen:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._taps: dict[int, list[Tensor]] = {}  # by slot, in the order of its tokens

    def __contains__(self, slot: int) -> bool:
        return slot in self._taps

    def add(self, slot: int, taps: Tensor) -> None:
        """They are kept as they are: nobody else may write there."""
        self._taps.setdefault(slot, []).append(taps)
        self.num_bytes += taps.nbytes

    def take(self, slot: int) -> Tensor | None:
        """All of a slot [n, num_taps * H], which then has none."""
        if (parts := self._taps.pop(slot, None)) is None:
            return None
        self.num_bytes -= sum(part.nbytes for part in parts)
        return torch.cat(parts)

    def largest(self) -> int:
        """The slot that has most."""
        return max(self._taps, key=lambda slot: sum(part.nbytes for part in self._taps[slot]))
