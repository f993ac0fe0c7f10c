"""What a drafter offers: the best tokens of each position, and how likely a child is after its parent.

Position d (0-based) proposes the token at depth d + 1 of the tree. Drafters whose positions are independent (DFlash)
leave `first` and `pairwise` empty; those that score a child given its parent (DFlash 2) fill them. A drafter that grows
a tree of its own (EAGLE-3), where every node has been asked for its children, hands it over in `tree`; the per-position
arrays then describe its likeliest chain.

On the host a draft is one request's, in numpy arrays, so that pilots, replay and other engines read the same object. On
a device it is that of R requests, in tensors with a leading axis R.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

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

    @property
    def is_sound(self) -> bool:
        """Whether scores are numbers, of a draft on the host. A drafter whose weights are damaged, or outgrow their
        dtype, gives others: then nothing is checked."""
        scores = (self.log_probs, self.first, self.pairwise, self.node_log_probs)
        return all(part is None or bool((part < np.inf).all()) for part in scores)

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
NO_DRAFT: HostDraft = Draft(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32))
MAX_MATCH = 16  # tokens that a copy's match is measured by


class Copy(NamedTuple):
    """What followed the last time the same words stood in a request's text: candidates behind its anchor."""

    token_ids: Sequence[int]
    num_matched: int  # tokens, the anchor the last of them, that are the same there; at most `MAX_MATCH`
    num_right: float  # tokens of copies that came true in this request, of late
    num_seen: float  # and those that were compared: the right ones, and the first wrong one of each copy


def node_probabilities(draft: HostDraft, tree: DraftTree) -> list[float | None]:
    """How likely the drafter found each node after its parent. None: the anchor, and tokens it has not proposed."""
    if draft.tree is not None and draft.node_log_probs is not None:
        return _grown_probabilities(draft.tree, draft.node_log_probs, tree)
    ranks = [{int(token_id): rank for rank, token_id in enumerate(row)} for row in draft.token_ids]
    found: list[float | None] = [None]
    own_ranks: list[int | None] = [None]
    for token_id, parent, depth in list(zip(tree.token_ids, tree.parents, tree.depths, strict=True))[1:]:
        rank = ranks[depth - 1].get(token_id) if depth <= len(ranks) else None
        own_ranks.append(rank)
        above = own_ranks[parent]
        if rank is None:
            found.append(None)
        elif draft.first is None or draft.pairwise is None:
            found.append(_as_probability(draft.log_probs[depth - 1, rank]))
        elif depth == 1:
            found.append(_as_probability(draft.first[rank]))
        else:
            found.append(None if above is None else _as_probability(draft.pairwise[depth - 2, above, rank]))
    return found


def _grown_probabilities(grown: DraftTree, log_probs: FloatArray, tree: DraftTree) -> list[float | None]:
    """Of a tree whose nodes were picked out of one that the drafter has grown."""
    children = {
        (parent, token_id): node
        for node, (parent, token_id) in enumerate(zip(grown.parents, grown.token_ids, strict=True))
    }
    nodes: list[int | None] = [0]
    for token_id, parent in list(zip(tree.token_ids, tree.parents, strict=True))[1:]:
        above = nodes[parent]
        nodes.append(None if above is None else children.get((above, token_id)))
    return [None if not node else _as_probability(log_probs[node - 1]) for node in nodes]


def _as_probability(log_prob: float) -> float:
    return float(np.exp(min(float(log_prob), 0.0)))
