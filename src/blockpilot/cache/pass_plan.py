"""The inputs of a pass of fixed shape: written on the host, sent to the device in one copy.

A shape is (requests, tokens per request), rounded up so that there are few. Requests and tokens that only round up
belong to a spare slot, or stand behind a request's own rows; nobody reads what they compute.
"""

from collections.abc import Sequence
from struct import pack_into
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.core.tree import DraftTree
from blockpilot.models.fused import PassInputs

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (2048, 1 << 30)  # how long slots are, roughly: long ones are read by more programs
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 129)
WORD = 32
MASK_CODES = {1: "I", 2: "Q"}  # a mask of so many words is one number of this kind


def round_up(value: int, steps: Sequence[int]) -> int:
    """The smallest step that holds the value; the value itself beyond the last."""
    return next((step for step in steps if step >= value), value)


def context_class(lengths: Sequence[int]) -> int:
    return round_up(max(lengths), CONTEXTS)


class Staging:
    """Named int32 arrays that lie together, twice: `host` to write, `device` to read."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        parts = [buffer.split(list(sizes.values())) for buffer in (self._host, self._device)]
        self._numbers = self._host.numpy()
        self.host: dict[str, NDArray[Any]] = {name: part.numpy() for name, part in zip(sizes, parts[0], strict=True)}
        self.device = dict(zip(sizes, parts[1], strict=True))

    def send(self) -> None:
        """Part of a captured pass: what is on the host when the graph runs is what the device gets."""
        self._device.copy_(self._host, non_blocking=True)

    def clear(self) -> None:
        self._numbers[:] = 0

    def copy(self) -> NDArray[Any]:
        """What is on the host now, for `restore`."""
        return self._numbers.copy()

    def restore(self, numbers: NDArray[Any]) -> None:
        self._numbers[:] = numbers


class PassPlan:
    def __init__(self, num_requests: int, count: int, context: int, device: torch.device, spare_slot: int) -> None:
        """`context` is how long slots may be for attention to be spread well; any length is read correctly."""
        self.num_requests, self.count, self.spare_slot = num_requests, count, spare_slot
        words = -(-count // WORD)
        num_tokens = num_requests * count
        self.staging = Staging(
            device,
            token_ids=num_tokens,
            positions=num_tokens,
            slots=num_requests,
            starts=num_requests,
            masks=num_tokens * words,
        )
        found = self.staging.device
        self.inputs = PassInputs(
            found["token_ids"],
            found["positions"],
            found["slots"],
            found["starts"],
            found["masks"].view(-1, words),
            context,
        )
        host = self.staging.host
        self._ids, self._positions = (host[name].reshape(num_requests, count) for name in ("token_ids", "positions"))
        self._slots, self._starts = host["slots"], host["starts"]
        self._masks = host["masks"].view(np.uint32).reshape(num_requests, count, words)
        self._slots[:] = spare_slot
        self._masks[:, :, 0] = 1
        self._blank = self.staging.copy()
        self.staging.send()

    def clear(self) -> None:
        """Every request rounds up: nothing of anybody's is touched."""
        self.staging.restore(self._blank)

    def write_trees(self, trees: Sequence[tuple[int, DraftTree]], lengths: Sequence[int]) -> None:
        """A tree (slot, tree) behind each slot's committed rows."""
        self.clear()
        for row, (slot, tree) in enumerate(trees):
            self._slots[row] = slot
            self._starts[row] = self._positions[row] = lengths[slot]
            pack_into(f"<{len(tree)}i", self._ids[row], 0, *tree.token_ids)
            self._positions[row, : len(tree)] += np.frombuffer(bytes(tree.depths), dtype=np.uint8)
            self._mark(row, _ancestors(tree))

    def write_blocks(self, blocks: Sequence[tuple[int, int, int, int]], lengths: Sequence[int], mask_id: int) -> None:
        """A drafter's block (slot, anchor id, position, size) behind each slot's rows; its tokens see each other."""
        self.clear()
        self._ids[:] = mask_id
        for row, (slot, anchor_id, position, size) in enumerate(blocks):
            self._slots[row], self._starts[row], self._positions[row] = slot, lengths[slot], position
            self._ids[row, 0] = anchor_id
            self._positions[row, :size] += np.arange(size, dtype=np.int32)
            self._mark(row, [(1 << size) - 1] * size)

    def _mark(self, row: int, seen: Sequence[int]) -> None:
        """Bit i of a token's mask: it sees the request's new row i. Tokens that round up see the first."""
        num_words = self._masks.shape[2]
        if num_words in MASK_CODES:
            pack_into(f"<{len(seen)}{MASK_CODES[num_words]}", self._masks[row], 0, *seen)
            return
        packed = b"".join([bits.to_bytes(num_words * WORD // 8, "little") for bits in seen])
        self._masks[row, : len(seen)] = np.frombuffer(packed, dtype="<u4").reshape(len(seen), -1)


def _ancestors(tree: DraftTree) -> list[int]:
    """For every node the bits of itself and its ancestors."""
    seen = [1]
    for index, parent in enumerate(tree.parents[1:], start=1):
        seen.append(seen[parent] | 1 << index)
    return seen
