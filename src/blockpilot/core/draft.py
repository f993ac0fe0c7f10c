"""What a drafter offers: the best tokens of each position, and how likely a child is after its parent.

Position d (0-based) proposes the token at depth d + 1 of the tree. Drafters whose positions are independent (DFlash)
leave `first` and `pairwise` empty; those that score a child given its parent (DFlash 2) fill them. A drafter that grows
a tree of its own (EAGLE-3), where every node has been asked for its children, hands it over in `tree`; the per-position
arrays then describe its likeliest chain.

On the host a draft is one request's, in numpy arrays, so that pilots, replay and other engines read the same object. On
a device it is that of R requests, in tensors with a leading axis R.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
Array = TypeVar("Array", bound="NDArray[Any] | Tensor")
Other = TypeVar("Other", bound="NDArray[Any] | Tensor")


@dataclass(frozen=True)
class Draft(Generic[Array]):
    token_ids: Array  # [D, K] int64, best first by the drafter's marginal score
    log_probs: Array  # [D, K] float32, log-probability of each over the drafter's whole vocabulary
    first: Array | None = None  # [K], log-probabilities of depth-1 children after the anchor
    pairwise: Array | None = None  # [D-1, K, K], log p(child j at position d+1 | parent i at position d)
    tree: DraftTree | None = None  # where set, trees and chains are picked out of it
    node_log_probs: FloatArray | None = None  # [n], log p(node | its path) of its nodes behind the anchor

    @property
    def num_positions(self) -> int:
        return int(self.token_ids.shape[-2])

    @property
    def width(self) -> int:
        return int(self.token_ids.shape[-1])

    @property
    def arrays(self) -> tuple[Array, Array, Array | None, Array | None]:
        return self.token_ids, self.log_probs, self.first, self.pairwise

    def map(self, make: Callable[[Array], Other]) -> "Draft[Other]":
        """The same draft in other arrays."""
        first, pairwise = (None if part is None else make(part) for part in (self.first, self.pairwise))
        return Draft(make(self.token_ids), make(self.log_probs), first, pairwise)

    def cut(self, depth: int, num_candidates: int) -> "Draft[Array]":
        """As deep and wide as a request asked for. A chain wants the best child, which pairs may rank anywhere."""
        token_ids, log_probs, first, pairwise = self.arrays
        if first is None or pairwise is None:
            return Draft(token_ids[:depth, :num_candidates], log_probs[:depth, :num_candidates])  # type: ignore[arg-type]
        width = self.width if num_candidates == 1 else num_candidates
        pairs = pairwise[: depth - 1, :width, :width]
        return Draft(token_ids[:depth, :width], log_probs[:depth, :width], first[:width], pairs)  # type: ignore[arg-type]


HostDraft = Draft[NDArray[Any]]
