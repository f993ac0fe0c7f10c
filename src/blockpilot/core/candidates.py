"""What a drafter offers: the best tokens of each position, and how likely a child is after its parent.

Small plain numpy arrays, so that pilots, replay and other engines read the same object. Position d (0-based) proposes
the token at depth d + 1 of the tree. Drafters whose positions are independent (DFlash) leave `pairwise` empty; those
that score a child given its parent (DFlash 2) fill it. Drafters that grow a tree of their own (EAGLE-3), where every
node has been asked for its children, hand it over in `tree`; the per-position arrays then describe its likeliest chain.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True)
class ProposedTree:
    """Nodes a drafter expanded itself, parents first. Entry j is node j + 1; node 0 is the anchor."""

    parents: IntArray  # [n]
    token_ids: IntArray  # [n]
    log_probs: FloatArray  # [n], log p(node | its path)

    def __len__(self) -> int:
        return len(self.token_ids)

    def path_scores(self) -> FloatArray:
        """Sum of log-probabilities [n] from the anchor to each node; never above the parent's."""
        scores = [np.float32(0)]
        for parent, step in zip(self.parents.tolist(), np.minimum(self.log_probs, 0), strict=True):
            scores.append(scores[parent] + step)
        return np.array(scores[1:], dtype=np.float32)


@dataclass(frozen=True)
class Candidates:
    token_ids: IntArray  # [D, K], best first by the drafter's marginal score
    log_probs: FloatArray  # [D, K], log-probability of each over the drafter's whole vocabulary
    first: FloatArray | None = None  # [K], log-probabilities of depth-1 children after the anchor
    pairwise: FloatArray | None = None  # [D-1, K, K], log p(child j at position d+1 | parent i at position d)
    tree: ProposedTree | None = None  # where set, trees and chains are picked out of it

    @property
    def num_positions(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def width(self) -> int:
        return int(self.token_ids.shape[1])

    @cached_property
    def is_plain(self) -> bool:
        """Whether compiled code can read the arrays as they are: exactly these dtypes, in C order."""
        are_pairs_plain = self.pairwise is None or _is_plain(self.pairwise, FLOAT)
        is_first_plain = self.first is None or _is_plain(self.first, FLOAT)
        return (
            _is_plain(self.token_ids, INT) and _is_plain(self.log_probs, FLOAT) and is_first_plain and are_pairs_plain
        )

    def best_children(self) -> list[list[int]]:
        """For every position and each rank of the parent, the child's rank with the best score; first, the anchor's."""
        if self.pairwise is None or self.first is None:
            return [[rank] * self.width for rank in self.log_probs.argmax(axis=-1).tolist()]
        later: list[list[int]] = self.pairwise.argmax(axis=-1).tolist()
        return [[int(self.first.argmax())], *later] if self.num_positions else []

    def child_log_probs(self, position: int, parent_rank: int) -> FloatArray:
        """Scores [K] of the candidates at `position`, given the rank of the parent chosen at `position - 1`."""
        if self.pairwise is None or self.first is None:
            return self.log_probs[position]
        return self.first if position == 0 else self.pairwise[position - 1, parent_rank]


def _is_plain(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return array.dtype is dtype and array.flags.carray
