"""Growing draft trees out of a drafter's candidates, or pruning the tree that the drafter grew itself.

Every way to order nodes is a stream of (probability that the node's whole path is right, parent, token id), likeliest
first, parents before children. `grow_chain` and `grow_tree` take a number of nodes from a stream; `grow_by_cost` takes
as many as bring the most tokens per millisecond.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from blockpilot.core.candidates import Candidates, FloatArray, IntArray, ProposedTree
from blockpilot.pilots.base import Nodes

Stream = Iterator[tuple[float, int, int]]


@dataclass(frozen=True)
class Growth:
    nodes: Nodes
    promised: float  # tokens that they bring if their probabilities are right; the target's own comes on top

    @property
    def depth(self) -> int:
        depths = [0]
        for parent, _ in self.nodes:
            depths.append(depths[parent] + 1)
        return max(depths)


def grow_chain(candidates: Candidates, max_nodes: int) -> Nodes:
    """The single best path: at every position the likeliest child of the one before."""
    return [(parent, token_id) for _, parent, token_id in islice(_chain_stream(candidates), max_nodes)]


def grow_tree(candidates: Candidates, num_nodes: int) -> Nodes:
    """The `num_nodes` likeliest nodes, best first."""
    return [(parent, token_id) for _, parent, token_id in islice(_tree_stream(candidates), num_nodes)]


def grow_by_cost(stream: Stream, step_ms: Sequence[float], trust: float = 1.0) -> Growth:
    """As many nodes as maximise expected tokens / milliseconds; `step_ms[n]` is a step that checks n nodes.

    All probabilities count `trust` times. Costs may rise in stairs, so the best number may lie behind a dip. With n
    nodes taken and the best rate r so far, m more can win only if their probabilities exceed r * (step_ms[n + m] -
    step_ms[n]). None exceeds the next node's, so growth ends when that lies below r * the smallest later rise.
    """
    rises = np.diff(step_ms)
    floors = np.minimum.accumulate(rises[::-1])[::-1].tolist()  # [n]: the smallest rise from n nodes on
    nodes: Nodes = []
    promised = best_promised = 0.0
    best_rate, best_count = 1.0 / step_ms[0], 0
    for count, (probability, parent, token_id) in enumerate(islice(stream, len(floors)), start=1):
        if trust * probability <= best_rate * floors[count - 1]:
            break
        nodes.append((parent, token_id))
        promised += probability
        rate = (1 + trust * promised) / step_ms[count]
        if rate > best_rate:
            best_rate, best_count, best_promised = rate, count, promised
    return Growth(nodes[:best_count], best_promised)


def best_first(first: FloatArray, later: FloatArray, token_ids: IntArray) -> Stream:
    """All paths through probabilities `first` [K] and `later` [D-1, K, K] of the tokens [D, K].

    The heap holds, for every node taken, its best child not yet taken. Taking a child puts back its next sibling and
    its own first child, so at most two entries are added per node.
    """
    if not len(token_ids):
        return
    last = len(token_ids) - 1
    ranks = range(len(first))
    family = sorted(zip((-first).tolist(), ranks, strict=True))  # (-probability, rank), best first
    heap = [(family[0][0], 0, 0, 0, 0, 1.0, family)]  # (-path, age, parent, position, sibling, parent's path, family)
    age = taken = 0
    while heap:
        negative, _, parent, position, sibling, above, family = heap[0]
        rank = family[sibling][1]
        yield -negative, parent, int(token_ids[position, rank])
        taken += 1
        age += 2
        sibling += 1
        if sibling < len(family):
            heapq.heapreplace(heap, (above * family[sibling][0], age, parent, position, sibling, above, family))
        else:
            heapq.heappop(heap)
        if position < last:
            children = sorted(zip((-later[position, rank]).tolist(), ranks, strict=True))
            entry = (-negative * children[0][0], age + 1, taken, position + 1, 0, -negative, children)
            heapq.heappush(heap, entry)


def likeliest_chain(first: FloatArray, later: FloatArray, token_ids: IntArray) -> Stream:
    """The path that takes the likeliest child at every position; arguments as for `best_first`."""
    path, row = 1.0, first
    for position in range(len(token_ids)):
        rank = int(row.argmax())
        path *= float(row[rank])
        yield path, position, int(token_ids[position, rank])
        if position < len(later):
            row = later[position, rank]


def proposed_nodes(tree: ProposedTree) -> Stream:
    """A drafter's own tree by path score. No child outscores its parent and ties keep the order: parents come first."""
    scores = tree.path_scores()
    places = {0: 0}
    for place, index in enumerate(np.argsort(-scores, kind="stable").tolist(), start=1):
        places[index + 1] = place
        yield float(np.exp(scores[index])), places[int(tree.parents[index])], int(tree.token_ids[index])


def proposed_chain(tree: ProposedTree) -> Stream:
    """The likeliest path of a drafter's own tree."""
    path, at, place = 1.0, 0, 0
    while len(children := np.flatnonzero(tree.parents == at)):
        best = int(children[np.argmax(tree.log_probs[children])])
        path *= float(np.exp(min(tree.log_probs[best], 0)))
        yield path, place, int(tree.token_ids[best])
        at, place = best + 1, place + 1


def _chain_stream(candidates: Candidates) -> Stream:
    if candidates.tree is not None:
        return proposed_chain(candidates.tree)
    return likeliest_chain(*_scores(candidates), candidates.token_ids)


def _tree_stream(candidates: Candidates) -> Stream:
    if candidates.tree is not None:
        return proposed_nodes(candidates.tree)
    return best_first(*_scores(candidates), candidates.token_ids)


def _scores(candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """The drafter's own probabilities, as they are."""
    if candidates.pairwise is not None and candidates.first is not None:
        return np.exp(candidates.first), np.exp(candidates.pairwise)
    size = candidates.width
    probabilities = np.exp(candidates.log_probs)
    later = np.broadcast_to(probabilities[1:, None], (max(len(probabilities) - 1, 0), size, size))
    return probabilities[0] if len(probabilities) else probabilities.reshape(-1), later
