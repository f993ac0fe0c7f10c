"""The draft tree: what one step asks the target to check.

Node 0 is the anchor, the last committed token. Every other node is a drafted token with a parent that stands before it
in the list, so one pass over the list visits parents first. A chain is the tree in which every node's parent is the
node before it; block size B is the chain of B nodes.
"""

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
        parents, token_ids = zip(*nodes, strict=True) if nodes else ((), ())
        return cls((anchor_id, *token_ids), (-1, *parents), _depths(parents))

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

    def children(self) -> list[dict[int, int]]:
        """For every node: drafted token id -> child index. The first of two equal siblings wins."""
        table: list[dict[int, int]] = [{} for _ in self.token_ids]
        for index in range(1, len(self.token_ids)):
            table[self.parents[index]].setdefault(self.token_ids[index], index)
        return table

    def ancestor_matrix(self) -> NDArray[np.bool_]:
        """[n, n]: row i is true at node i and at its ancestors, the only tree nodes it may attend to."""
        matrix = np.eye(len(self.token_ids), dtype=np.bool_)
        for index, parent in enumerate(self.parents[1:], start=1):
            matrix[index] |= matrix[parent]
        return matrix


@lru_cache(maxsize=4096)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Of the anchor and the nodes with these parents: the same shapes come again and again."""
    depths = [0]
    for parent in parents:
        if not 0 <= parent < len(depths):
            raise InputError(f"draft tree: parent {parent} does not stand before node {len(depths)}")
        depths.append(depths[parent] + 1)
    return tuple(depths)
