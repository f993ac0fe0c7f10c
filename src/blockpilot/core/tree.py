"""The draft tree: what one step asks the target to check.

Node 0 is the anchor, the last committed token. Every other node is a drafted token with a parent that stands before it
in the list, so one pass over the list visits parents first. A chain is the tree in which every node's parent is the
node before it; block size B is the chain of B nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError


@dataclass(frozen=True)
class DraftTree:
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def build(cls, anchor_id: int, nodes: list[tuple[int, int]]) -> "DraftTree":
        """`nodes` are (parent index, token id) pairs, parents first; index 0 is the anchor."""
        token_ids, parents = (anchor_id, *(token_id for _, token_id in nodes)), (-1, *(parent for parent, _ in nodes))
        return cls(token_ids, parents, tree_depths(parents))

    @classmethod
    def chain(cls, anchor_id: int, drafted_ids: list[int]) -> "DraftTree":
        size = len(drafted_ids) + 1
        return cls((anchor_id, *drafted_ids), tuple(range(-1, size - 1)), tuple(range(size)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def up_to(self, depth: int) -> "DraftTree":
        """The same tree without its nodes below `depth`."""
        if len(self.depths) <= depth or max(self.depths) <= depth:  # no node is deeper than their number
            return self
        kept = [index for index, found in enumerate(self.depths) if found <= depth]
        renamed = {index: place for place, index in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(self.token_ids[index] for index in kept),
            tuple(renamed[self.parents[index]] for index in kept),
            tuple(self.depths[index] for index in kept),
        )

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        return self.depths[-1] == len(self.token_ids) - 1

    def ancestor_matrix(self) -> NDArray[np.bool_]:
        """[n, n]: row i is true at node i and at its ancestors, the only tree nodes it may attend to."""
        bits = [mask.to_bytes(-(-len(self) // 8), "little") for mask in ancestor_bits(self.parents)]
        packed = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(self), -1)
        return np.unpackbits(packed, axis=1, count=len(self), bitorder="little").astype(np.bool_)


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For every node a number whose bit i says that it may attend to node i: itself and its ancestors."""
    masks, own = [1], 1
    for parent in parents[1:]:
        own <<= 1
        masks.append(masks[parent] | own)
    return masks


@lru_cache(maxsize=4096)
def tree_depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Of the anchor and the nodes with these parents, -1 first. The same shapes come again and again."""
    depths = [0]
    for parent in parents[1:]:
        if not 0 <= parent < len(depths):
            raise InputError(f"draft tree: parent {parent} does not stand before node {len(depths)}")
        depths.append(depths[parent] + 1)
    return tuple(depths)
