"""The inputs of a pass of fixed shape: written on the host, sent to the device in one copy.

A shape is (requests, tokens per request), rounded up so that there are few. Requests and tokens that only round up
belong to a spare slot, or stand behind a request's own rows; nobody reads what they compute.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, pack, pack_into
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.models.fused import PassInputs
from blockpilot.models.gpu import fused_kernels
from blockpilot.models.kernels_reference import Noise
from blockpilot.models.trees_reference import NextBlocks, Trees

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (2048, 1 << 30)  # how long slots are, roughly: long ones are read by more programs
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 129)
WORD = 32
Words = tuple[int, int, int]  # temperature and seed of a request, `SamplingParams.words`
GREEDY: Words = (0, 0, 0)
NO_TREE = (0, 0)
MASK_CODES = {1: "I", 2: "Q"}  # a mask of so many words is one number of this kind


def round_up(value: int, steps: Sequence[int]) -> int:
    """The smallest step that holds the value; the value itself beyond the last."""
    place = bisect_left(steps, value)
    return steps[place] if place < len(steps) else value


def context_class(lengths: Sequence[int]) -> int:
    return round_up(max(lengths), CONTEXTS)


def context_classes(capacity: int) -> Sequence[int]:
    """Those that requests can come into whose slots, with room for a tree, have this capacity."""
    return CONTEXTS[: 1 + sum(context < capacity - MAX_TREE_NODES for context in CONTEXTS[:-1])]


class Staging:
    """Named int32 arrays that lie together, twice: `host` to write, `device` to read."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        parts = [buffer.split(list(sizes.values())) for buffer in (self._host, self._device)]
        self.places = dict(zip(sizes, parts[0], strict=True))  # `host` for those who write from the device
        self._numbers = self._host.numpy()
        self.memory = self._numbers.data
        self.host: dict[str, NDArray[Any]] = {name: part.numpy() for name, part in zip(sizes, parts[0], strict=True)}
        self.device = dict(zip(sizes, parts[1], strict=True))

    def send(self) -> None:
        """Part of a captured pass: what is on the host when the graph runs is what the device gets.

        The kernel behind it must be one that waits for everything before it, as `embed` does: later ones look at
        slots and lengths before they wait.
        """
        fused_kernels(self._device.device).send(self._host, self._device)

    def write(self, numbers: Sequence[int], start: int = 0) -> None:
        """From the number at `start` on, over the borders of arrays: on the host's critical path one call is best."""
        pack_into(f"<{len(numbers)}i", self.memory, 4 * start, *numbers)

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
            sampling=3 * num_requests,
            limits=2 * num_requests,
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
        self.anchors = found["token_ids"].view(num_requests, count)[:, 0]  # the first token of each request, ..
        self.anchor_positions = found["positions"].view(num_requests, count)[:, 0]  # .. and where it stands
        self._sampling = found["sampling"].view(3, num_requests)
        places, host = self.staging.places, self.staging.host
        self.limits = places["limits"].view(num_requests, 2)  # of trees that grow on the device; it reads them here
        self.next_blocks = NextBlocks(
            found["slots"],
            found["positions"],
            spare_slot,
            *(places[name] for name in ("token_ids", "positions", "starts")),
        )
        self.trees = Trees(places["token_ids"], places["positions"], places["masks"].view(-1, words), places["starts"])
        self._words = host["sampling"].reshape(3, num_requests)  # temperatures and seeds
        self._ids, self._positions = (host[name].reshape(num_requests, count) for name in ("token_ids", "positions"))
        self._slots, self._starts = host["slots"], host["starts"]
        self._limits = host["limits"].reshape(num_requests, 2)
        self._masks = host["masks"].view(np.uint32).reshape(num_requests, count, words)
        self._slots[:] = spare_slot
        self._masks[:, :, 0] = 1
        self._mask_bytes = host["masks"].data.cast("B")
        self._layout = Struct(f"<{2 * count + 7}i{4 * count * words}s")  # of all arrays, where there is one request
        self._blank = self.staging.copy()
        self.staging.send()

    def clear(self) -> None:
        """Every request rounds up: nothing of anybody's is touched."""
        self.staging.restore(self._blank)

    def clear_all(self) -> None:
        """On the device, too, before kernels are recorded that read it there: they run, and must not meet any slot."""
        self.clear()
        self.staging.send()

    def noise(self, shift: int) -> Noise:
        """Of sampling; `shift` is 0 where a token's logits decide on itself, 1 where they decide on what follows it."""
        return Noise(self._sampling[0].view(torch.float32), self._sampling[1:], self.inputs.positions, shift)

    def write_trees(
        self, trees: Sequence[tuple[int, DraftTree]], lengths: Sequence[int], words: Sequence[Words]
    ) -> None:
        """A tree (slot, tree) behind each slot's committed rows; `words` say how its request samples."""
        if self.num_requests == 1:
            self._write_tree(*trees[0], lengths, words[0])
            return
        starts = self.place([slot for slot, _ in trees], lengths, words)
        self._write_shapes([_tree_shape(tree.parents, self.count) for _, tree in trees], starts)
        write_rows(self._ids, [tree.token_ids for _, tree in trees])

    def write_blocks(
        self,
        blocks: Sequence[tuple[int, int, int, int]],
        lengths: Sequence[int],
        words: Sequence[Words],
        mask_id: int,
        limits: Sequence[tuple[int, int]],
    ) -> None:
        """A drafter's block (slot, anchor id, position, size) behind each slot's rows; its tokens see each other.

        `limits` are those of the trees that grow out of the blocks, where that happens on the device.
        """
        if self.num_requests == 1:
            self._write_block(*blocks[0], lengths, words[0], mask_id, limits[0])
            return
        slots, anchor_ids, positions, sizes = zip(*blocks, strict=True)
        self.place(slots, lengths, words)
        self._limits[: len(limits)] = limits
        self._write_shapes([_block_shape(size, self.count) for size in sizes], positions)
        self._ids[:] = mask_id
        self._ids[: len(blocks), 0] = anchor_ids

    def _write_tree(self, slot: int, tree: DraftTree, lengths: Sequence[int], words: Words) -> None:
        """Of the only request. It waits for every microsecond of this, and one call for all arrays takes the fewest."""
        start, num_extra = lengths[slot], self.count - len(tree)
        ids = (*tree.token_ids, *[0] * num_extra)
        positions = (*[start + depth for depth in tree.depths], *[start] * num_extra)
        _, masks = _tree_shape(tree.parents, self.count)
        self._layout.pack_into(self.staging.memory, 0, *ids, *positions, slot, start, *words, *NO_TREE, masks)

    def _write_block(
        self,
        slot: int,
        anchor_id: int,
        position: int,
        size: int,
        lengths: Sequence[int],
        words: Words,
        mask_id: int,
        limits: tuple[int, int],
    ) -> None:
        ids = (anchor_id, *[mask_id] * (self.count - 1))
        positions = (*range(position, position + size), *[position] * (self.count - size))
        _, masks = _block_shape(size, self.count)
        self._layout.pack_into(self.staging.memory, 0, *ids, *positions, slot, lengths[slot], *words, *limits, masks)

    def place(self, slots: Sequence[int], lengths: Sequence[int], words: Sequence[Words]) -> list[int]:
        """One request in each of these slots; where its rows start. Its tokens are written next, or by a kernel."""
        if len(slots) < self.num_requests:
            self.clear()
        starts = [lengths[slot] for slot in slots]
        self._slots[: len(slots)], self._starts[: len(slots)] = slots, starts
        self._words[:, : len(slots)] = tuple(zip(*words, strict=True))
        return starts

    def _write_shapes(self, shapes: Sequence[tuple[bytes, bytes]], positions: Sequence[int]) -> None:
        """Positions and masks of all requests; `positions` are those of their first tokens."""
        offsets, masks = zip(*shapes, strict=True)
        found = np.frombuffer(b"".join(offsets), dtype=np.int32).reshape(len(shapes), self.count)
        np.add(found, np.array(positions, dtype=np.int32)[:, None], out=self._positions[: len(shapes)])
        packed = b"".join(masks)
        self._mask_bytes[: len(packed)] = packed


def write_rows(array: NDArray[Any], rows: Sequence[Sequence[int]]) -> None:
    """Rows of different lengths into an int32 array [R, n], zeros behind each."""
    width = array.shape[1]
    flat: list[int] = []
    for row in rows:
        flat += row
        flat += (0,) * (width - len(row))
    pack_into(f"<{len(flat)}i", array.data, 0, *flat)


@lru_cache(maxsize=4096)
def _tree_shape(parents: Sequence[int], count: int) -> tuple[bytes, bytes]:
    """The offsets of a tree's tokens from its first and their masks, for `count` tokens: small shapes come again."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return _pack_offsets(depths, count), _pack_masks(_tree_masks(parents), count)


@lru_cache(maxsize=1024)
def _block_shape(size: int, count: int) -> tuple[bytes, bytes]:
    """The same of a block whose tokens all see each other."""
    return _pack_offsets(range(size), count), _pack_masks([(1 << size) - 1] * size, count)


def _tree_masks(parents: Sequence[int]) -> list[int]:
    """Bit i of a token's mask says that it sees the request's new row i: itself and its ancestors."""
    masks, own = [1], 1
    for parent in parents[1:]:
        own <<= 1
        masks.append(masks[parent] | own)
    return masks


def _pack_offsets(offsets: Sequence[int], count: int) -> bytes:
    """As int32. Tokens that round up stand, and look, where the first does."""
    return pack(f"<{count}i", *offsets, *[0] * (count - len(offsets)))


def _pack_masks(masks: Sequence[int], count: int) -> bytes:
    num_extra, num_words = count - len(masks), -(-count // WORD)
    if num_words in MASK_CODES:
        return pack(f"<{count}{MASK_CODES[num_words]}", *masks, *[1] * num_extra)
    return b"".join([bits.to_bytes(num_words * WORD // 8, "little") for bits in (*masks, *[1] * num_extra)])
