"""What a drafter offers: the best tokens of each position, and how likely a child is after its parent.

Small plain numpy arrays, so that pilots, replay and other engines read the same object. Position d (0-based) proposes
the token at depth d + 1 of the tree. Drafters whose positions are independent (DFlash) leave `pairwise` empty; those
that score a child given its parent (DFlash 2) fill it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    token_ids: IntArray  # [D, K], best first by the drafter's marginal score
    log_probs: FloatArray  # [D, K], log-probability of each over the drafter's whole vocabulary
    first: FloatArray | None = None  # [K], log-probabilities of depth-1 children after the anchor
    pairwise: FloatArray | None = None  # [D-1, K, K], log p(child j at position d+1 | parent i at position d)

    @property
    def num_positions(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def width(self) -> int:
        return int(self.token_ids.shape[1])

    def child_log_probs(self, position: int, parent_rank: int) -> FloatArray:
        """Scores [K] of the candidates at `position`, given the rank of the parent chosen at `position - 1`."""
        if self.pairwise is None or self.first is None:
            return self.log_probs[position]
        return self.first if position == 0 else self.pairwise[position - 1, parent_rank]
