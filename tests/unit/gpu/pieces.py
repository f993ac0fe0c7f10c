"""What a pass reads, for any trees, prompts and blocks."""

import random as stdlib_random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.tree import ancestor_bits, tree_depths
from blockpilot.gpu.interface import PassInputs
from blockpilot.gpu.plan import WORD

Parents = tuple[int, ...]  # of a tree's nodes, -1 first
CPU = torch.device("cpu")


def chain(size: int) -> Parents:
    return tuple(range(-1, size - 1))


def random_tree(seed: int, size: int, reach: int = 1 << 30) -> Parents:
    """Any shape, parents first; nodes hang at most `reach` places behind their parents, so that a small one is deep."""
    source = stdlib_random.Random(seed)
    return (-1, *(source.randrange(max(0, node - reach), node) for node in range(1, size)))


def is_chain(parents: Parents) -> bool:
    return parents == chain(len(parents))


def paths(parents: Parents) -> list[list[int]]:
    """The nodes from the anchor to every leaf."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found


def tree_inputs(
    trees: Sequence[Parents],
    slots: Sequence[int],
    starts: Sequence[int],
    *,
    count: int = 0,
    context: int = 2048,
    device: torch.device = CPU,
) -> PassInputs:
    """A tree behind each slot's rows, all rounded up to `count` tokens."""
    count = count or max(map(len, trees))
    offsets = [[*tree_depths(tree), *[0] * (count - len(tree))] for tree in trees]
    masks = [[*ancestor_bits(tree), *[1] * (count - len(tree))] for tree in trees]
    branches = numbers([int(not is_chain(tree)) for tree in trees], device)
    return _inputs(offsets, _pack(masks, count, device), branches, slots, starts, context, device)


def block_inputs(
    sizes: Sequence[int],
    slots: Sequence[int],
    starts: Sequence[int],
    *,
    context: int = 2048,
    device: torch.device = CPU,
) -> PassInputs:
    """A drafter's block behind each slot's rows; its tokens see each other."""
    count = max(sizes)
    offsets = [[*range(size), *[0] * (count - size)] for size in sizes]
    masks = [[*[(1 << size) - 1] * size, *[1] * (count - size)] for size in sizes]
    return _inputs(offsets, _pack(masks, count, device), None, slots, starts, context, device)


def prompt_inputs(
    sizes: Sequence[int],
    slots: Sequence[int],
    starts: Sequence[int],
    *,
    count: int = 0,
    context: int = 2048,
    device: torch.device = CPU,
) -> PassInputs:
    """A piece of a prompt behind each slot's rows."""
    count = count or max(sizes)
    offsets = [[*range(size), *[0] * (count - size)] for size in sizes]
    return _inputs(offsets, None, None, slots, starts, context, device)


def numbers(values: Sequence[int], device: torch.device = CPU) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _inputs(
    offsets: Sequence[Sequence[int]],
    masks: Tensor | None,
    branches: Tensor | None,
    slots: Sequence[int],
    starts: Sequence[int],
    context: int,
    device: torch.device,
) -> PassInputs:
    positions = numbers([start + offset for start, own in zip(starts, offsets, strict=True) for offset in own], device)
    given = positions, positions, numbers(slots, device), numbers(starts, device)
    return PassInputs(*given, masks, branches, context)


def _pack(masks: Sequence[Sequence[int]], count: int, device: torch.device) -> Tensor:
    num_words = -(-count // WORD)
    packed = b"".join(bits.to_bytes(4 * num_words, "little") for own in masks for bits in own)
    return torch.from_numpy(np.frombuffer(packed, dtype=np.int32).reshape(-1, num_words).copy()).to(device)
