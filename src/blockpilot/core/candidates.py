"""What a drafter offers: the best tokens of each position, and how likely a child is after its parent.

Small plain numpy arrays, so that pilots, replay and other engines read the same object. Position d (0-based) proposes
the token at depth d + 1 of the tree. Drafters whose positions are independent (DFlash) leave `pairwise` empty; those
that score a child given its parent (DFlash 2) fill it. Drafters that grow a tree of their own (EAGLE-3), where every
node has been asked for its children, hand it over in `tree`; the per-position arrays then describe its likeliest chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, eq=False)
class CandidateStack:
    """The blocks of many requests, one behind the other in memory, so that one call of compiled code reads them all.

    Arrays have exactly the dtypes of `Candidates` and lie in C order. Where a drafter does not score a child given its
    parent, `first` and `pairwise` have rows without numbers.
    """

    token_ids: IntArray  # [R, D, K]
    log_probs: FloatArray  # [R, D, K]
    first: FloatArray  # [R, K]
    pairwise: FloatArray  # [R, D-1, K, K]

    @classmethod
    def of(
        cls, token_ids: IntArray, log_probs: FloatArray, first: FloatArray | None, pairwise: FloatArray | None
    ) -> "CandidateStack | None":
        """None where compiled code cannot read the arrays as they are."""
        if first is None or pairwise is None:
            first, pairwise = np.zeros((len(token_ids), 0), FLOAT), np.zeros((len(token_ids), 0, 0, 0), FLOAT)
        is_plain = _is_plain(token_ids, INT) and all(_is_plain(part, FLOAT) for part in (log_probs, first, pairwise))
        return cls(token_ids, log_probs, first, pairwise) if is_plain else None


@dataclass(frozen=True)
class Candidates:
    token_ids: IntArray  # [D, K], best first by the drafter's marginal score
    log_probs: FloatArray  # [D, K], log-probability of each over the drafter's whole vocabulary
    first: FloatArray | None = None  # [K], log-probabilities of depth-1 children after the anchor
    pairwise: FloatArray | None = None  # [D-1, K, K], log p(child j at position d+1 | parent i at position d)
    tree: ProposedTree | None = None  # where set, trees and chains are picked out of it
    stack: CandidateStack | None = field(default=None, repr=False, compare=False)  # where set, the arrays are parts ..
    row: int = field(default=0, repr=False, compare=False)  # .. of this row of it

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


def shared_stack(candidates: Sequence[Candidates]) -> CandidateStack | None:
    """The stack that all of them are rows of, with as many positions and tokens each; None if there is none."""
    stack, shape = candidates[0].stack, candidates[0].token_ids.shape
    is_shared = all(one.stack is stack and one.token_ids.shape == shape for one in candidates)
    return stack if is_shared else None


def stack_candidates(candidates: Sequence[Candidates]) -> list[Candidates]:
    """Copies of candidates of one shape, without trees, that lie in memory as those of a batch do."""
    token_ids = np.stack([one.token_ids for one in candidates])
    log_probs = np.stack([one.log_probs for one in candidates])
    firsts = [one.first for one in candidates if one.first is not None]
    later = [one.pairwise for one in candidates if one.pairwise is not None]
    first, pairwise = (np.stack(firsts), np.stack(later)) if later else (None, None)
    stack = CandidateStack.of(token_ids, log_probs, first, pairwise)
    return [
        Candidates(
            token_ids[row],
            log_probs[row],
            None if first is None else first[row],
            None if pairwise is None else pairwise[row],
            stack=stack,
            row=row,
        )
        for row in range(len(candidates))
    ]


def _is_plain(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return array.dtype is dtype and array.flags.carray
