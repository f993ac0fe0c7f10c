"""The tree of one EAGLE-3 request while it grows, one depth per pass of the drafter.

At every depth the best `width` nodes of the frontier are expanded: each takes part in the next pass and is given its
likeliest children. A chain is the same with width 1 and one child. The likeliest chain is always expanded, however its
score stands among the others, so that a pilot that wants a chain finds one of full length.

A pass leaves one cache row per expanded node behind, and `ancestors` says which of them a new row may look at.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import Draft, FloatArray, HostDraft, IntArray
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import DraftRequest


class GrowingTree:
    def __init__(self, request: DraftRequest, *, width: int, num_children: int) -> None:
        self.request = request
        self.is_chain = request.num_candidates == 1
        self.width = 1 if self.is_chain else width
        self.num_children = min(num_children, request.num_candidates)
        self.max_depth = request.block_size - 1
        self.depth = 0  # passes made so far
        self.frontier: list[int] = [0]  # nodes of the next pass; node 0 is the anchor
        self.parent_rows: list[int] = [0]  # for each of them, the row of the last pass whose output it continues
        self._parents, self._token_ids = [-1], [request.anchor_id]
        self._log_probs, self._scores = [0.0], [0.0]
        self._chain_ids: list[IntArray] = []  # per depth, candidates along the likeliest chain
        self._chain_log_probs: list[FloatArray] = []
        self._chain_end = 0
        self._expanded: dict[int, int] = {}  # node -> its cache row behind the context

    @property
    def is_growing(self) -> bool:
        return self.depth < self.max_depth

    @property
    def frontier_ids(self) -> list[int]:
        return [self._token_ids[node] for node in self.frontier]

    def ancestors(self) -> NDArray[np.bool_]:
        """[frontier, rows of earlier passes + frontier]: itself and its ancestors, of all rows behind the context."""
        start = len(self._expanded)
        seen = np.zeros((len(self.frontier), start + len(self.frontier)), dtype=np.bool_)
        for index, node in enumerate(self.frontier):
            seen[index, start + index] = True
            while (node := self._parents[node]) >= 0:
                seen[index, self._expanded[node]] = True
        return seen

    def grow(self, token_ids: IntArray, log_probs: FloatArray) -> None:
        """Take the candidates [frontier, K], best first, that one pass gave the frontier's nodes."""
        children: list[tuple[int, int]] = []  # (node, row of its parent in this pass)
        chain_end = self._chain_end
        for row, node in enumerate(self.frontier):
            self._expanded[node] = len(self._expanded)
            first = len(self._parents)
            if node == self._chain_end:
                self._chain_ids.append(token_ids[row])
                self._chain_log_probs.append(log_probs[row])
                chain_end = first
            for rank in range(min(self.num_children, token_ids.shape[1])):
                children.append((self._add(node, int(token_ids[row, rank]), float(log_probs[row, rank])), row))
        self._chain_end = chain_end
        self.depth += 1
        best = self._best(children)
        self.frontier, self.parent_rows = [node for node, _ in best], [row for _, row in best]

    def draft(self) -> HostDraft:
        token_ids, log_probs = np.stack(self._chain_ids), np.stack(self._chain_log_probs)
        if self.is_chain:
            return Draft(token_ids, log_probs)
        tree = DraftTree.build(self._token_ids[0], list(zip(self._parents[1:], self._token_ids[1:], strict=True)))
        return Draft(token_ids, log_probs, tree=tree, node_log_probs=np.array(self._log_probs[1:], dtype=np.float32))

    def _add(self, parent: int, token_id: int, log_prob: float) -> int:
        self._parents.append(parent)
        self._token_ids.append(token_id)
        self._log_probs.append(log_prob)
        self._scores.append(self._scores[parent] + log_prob)
        return len(self._parents) - 1

    def _best(self, children: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The `width` best-scored children, the chain's end among them, in the order of their numbers."""
        ranked = sorted(children, key=lambda child: (child[0] != self._chain_end, -self._scores[child[0]]))
        return sorted(ranked[: self.width])
