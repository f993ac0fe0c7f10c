"""The inputs of a recorded pass: written on the host, sent to the device in one copy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from struct import pack, pack_into
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.core.tree import DraftTree, ancestor_bits, tree_depths
from blockpilot.decoding.drafter import DraftRequest
from blockpilot.gpu.interface import NextBlocks, Noise, PassInputs, TreeLimits, find_kernels

WORD = 32  # bits of a mask's word
Words = tuple[int, int, int]  # temperature and seed of a request, `SamplingParams.words`
GREEDY: Words = (0, 0, 0)


class Staging:
    """Named int32 arrays that lie together, twice: `host` to write, `device` to read."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        parts = [
            dict(zip(sizes, buffer.split(list(sizes.values())), strict=True)) for buffer in (self._host, self._device)
        ]
        self.pinned, self.device = parts  # the host's as tensors, for kernels that write there
        self.host: dict[str, NDArray[Any]] = {name: part.numpy() for name, part in self.pinned.items()}
        self._numbers = self._host.numpy()
        self._kernels = find_kernels(device)

    def send(self) -> None:
        """Part of a recorded pass: what is on the host when the graph runs is what the device gets.

        The kernel behind it must be one that waits for everything before it, as `embed` does: later ones look at
        slots and lengths before they wait.
        """
        self._kernels.send(self._host, self._device)

    def write(self, numbers: Sequence[int], start: int = 0) -> None:
        """From the number at `start` on, over the borders of arrays: on the host's critical path one call is best."""
        pack_into(f"<{len(numbers)}i", self._numbers.data, 4 * start, *numbers)

    def copy(self) -> NDArray[Any]:
        """What is on the host now, for `restore`."""
        return self._numbers.copy()

    def restore(self, numbers: NDArray[Any]) -> None:
        self._numbers[:] = numbers


class PassPlan:
    def __init__(
        self,
        num_requests: int,
        count: int,
        context: int,
        device: torch.device,
        spare_slot: int,
        *,
        is_prompt: bool = False,
        can_branch: bool = False,
    ) -> None:
        """`context` is how long slots may be. Tokens of a prompt need no masks; only trees `can_branch`."""
        self.num_requests, self.count, self.spare_slot = num_requests, count, spare_slot
        self.is_prompt = is_prompt
        num_words, num_tokens = 0 if is_prompt else -(-count // WORD), num_requests * count
        self.staging = Staging(
            device,
            token_ids=num_tokens,
            positions=num_tokens,
            slots=num_requests,
            starts=num_requests,
            sampling=3 * num_requests,
            limits=2 * num_requests,
            branches=num_requests,
            last_rows=num_requests if is_prompt else 0,
            masks=num_tokens * num_words,
        )
        self.staged = self._pass_inputs(self.staging.pinned, context)
        self.inputs = self._pass_inputs(self.staging.device, context)
        if not can_branch:
            self.inputs = replace(self.inputs, branches=None)
        host = self.staging.host
        self._ids, self._positions = (host[name].reshape(num_requests, count) for name in ("token_ids", "positions"))
        self._slots, self._starts = host["slots"], host["starts"]
        self._words, self._limits = host["sampling"].reshape(3, num_requests), host["limits"].reshape(num_requests, 2)
        self._branches, self._mask_bytes = host["branches"], host["masks"].data.cast("B")
        self._slots[:] = spare_slot
        host["masks"].reshape(num_tokens, num_words)[:, :1] = 1
        self._blank = self.staging.copy()
        self.staging.send()

    def clear(self) -> None:
        """Padding only: every row belongs to the spare slot."""
        self.staging.restore(self._blank)

    def clear_all(self) -> None:
        """On the device, too. Kernels run while they are recorded, and must not touch a request's slot."""
        self.clear()
        self.staging.send()

    def noise(self, shift: int) -> Noise:
        """Of sampling; `shift` is 0 where a token's logits decide on itself, 1 where they decide on what follows it."""
        sampling = self.staging.device["sampling"].view(3, self.num_requests)
        return Noise(sampling[0].view(torch.float32), sampling[1:], self.inputs.positions, shift)

    @property
    def last_rows(self) -> Tensor:
        """[R] where each prompt's last token is among all tokens."""
        return self.staging.device["last_rows"]

    @property
    def anchor_positions(self) -> Tensor:
        return self.inputs.positions.view(self.num_requests, self.count)[:, 0]

    @property
    def tree_limits(self) -> TreeLimits:
        """Of the trees that grow on the device out of this plan's blocks; it reads the limits on the host."""
        limits = self.staging.pinned["limits"].view(self.num_requests, 2)
        anchors = self.inputs.token_ids.view(self.num_requests, self.count)[:, 0]
        return TreeLimits(self.noise(0).temperatures, limits, anchors, self.anchor_positions)

    @property
    def next_blocks(self) -> NextBlocks:
        """From what this plan holds on the device to what it shall hold in the next step."""
        staged = self.staged
        given = self.inputs.slots, self.inputs.positions, self.spare_slot
        return NextBlocks(*given, staged.token_ids, staged.positions, staged.starts)

    def write_trees(
        self, trees: Sequence[tuple[int, DraftTree]], lengths: Sequence[int], words: Sequence[Words]
    ) -> None:
        """A tree (slot, tree) behind each slot's committed rows; `words` say how its request samples."""
        starts = self.place([slot for slot, _ in trees], lengths, words)
        self._write_shapes([tree_shape(tree.parents, self.count) for _, tree in trees], starts)
        self._branches[: len(trees)] = [not tree.is_chain for _, tree in trees]
        ids: list[int] = []
        for _, tree in trees:
            ids += tree.token_ids
            ids += (0,) * (self.count - len(tree))
        self.staging.write(ids)

    def write_prompts(
        self, pieces: Sequence[tuple[int, Sequence[int]]], lengths: Sequence[int], words: Sequence[Words]
    ) -> None:
        """Tokens (slot, ids) of prompts behind each slot's rows. Padding has the position of the first token."""
        starts = self.place([slot for slot, _ in pieces], lengths, words)
        for row, ((_, ids), start) in enumerate(zip(pieces, starts, strict=True)):
            self._ids[row, : len(ids)], self._ids[row, len(ids) :] = ids, 0
            self._positions[row] = start
            self._positions[row, : len(ids)] += np.arange(len(ids), dtype=np.int32)
            self.staging.host["last_rows"][row] = row * self.count + len(ids) - 1

    def write_blocks(self, requests: Sequence[DraftRequest], lengths: Sequence[int], mask_id: int) -> None:
        """A drafter's block behind each slot's rows; its tokens see each other."""
        self.place([one.slot for one in requests], lengths, [one.params.words for one in requests])
        self._limits[: len(requests)] = [one.limits for one in requests]
        shapes = [_block_shape(one.block_size, self.count) for one in requests]
        self._write_shapes(shapes, [one.position for one in requests])
        self._ids[:] = mask_id
        self._ids[: len(requests), 0] = [one.anchor_id for one in requests]

    def place(self, slots: Sequence[int], lengths: Sequence[int], words: Sequence[Words]) -> list[int]:
        """One request in each of these slots; where its rows start. Its tokens are written next, or by a kernel."""
        if len(slots) < self.num_requests:
            self.clear()
        starts = [lengths[slot] for slot in slots]
        self._slots[: len(slots)], self._starts[: len(slots)] = slots, starts
        self._words[:, : len(slots)] = tuple(zip(*words, strict=True))
        return starts

    def _pass_inputs(self, arrays: dict[str, Tensor], context: int) -> PassInputs:
        return PassInputs(
            token_ids=arrays["token_ids"],
            positions=arrays["positions"],
            slots=arrays["slots"],
            starts=arrays["starts"],
            masks=None if self.is_prompt else arrays["masks"].view(self.num_requests * self.count, -1),
            branches=arrays["branches"],
            context=context,
        )

    def _write_shapes(self, shapes: Sequence[tuple[bytes, bytes]], positions: Sequence[int]) -> None:
        """Positions and masks of all requests; `positions` are those of their first tokens."""
        offsets, masks = zip(*shapes, strict=True)
        found = np.frombuffer(b"".join(offsets), dtype=np.int32).reshape(len(shapes), self.count)
        np.add(found, np.array(positions, dtype=np.int32)[:, None], out=self._positions[: len(shapes)])
        packed = b"".join(masks)
        self._mask_bytes[: len(packed)] = packed


@lru_cache(maxsize=4096)
def tree_shape(parents: tuple[int, ...], count: int) -> tuple[bytes, bytes]:
    """The offsets of a tree's tokens from its first and their masks, for `count` tokens: small shapes come again."""
    return _pack_shape(tree_depths(parents), ancestor_bits(parents), count)


@lru_cache(maxsize=1024)
def _block_shape(size: int, count: int) -> tuple[bytes, bytes]:
    """The same of a block whose tokens all see each other."""
    return _pack_shape(range(size), [(1 << size) - 1] * size, count)


def _pack_shape(offsets: Sequence[int], masks: Sequence[int], count: int) -> tuple[bytes, bytes]:
    """As int32. Padding tokens get the first token's position and see it alone."""
    num_extra, num_bytes = count - len(offsets), -(-count // WORD) * WORD // 8
    words = b"".join([bits.to_bytes(num_bytes, "little") for bits in (*masks, *[1] * num_extra)])
    return pack(f"<{count}i", *offsets, *[0] * num_extra), words
