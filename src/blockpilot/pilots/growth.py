"""Growing draft trees out of a drafter's candidates."""

import heapq

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.pilots.base import Nodes


def grow_chain(candidates: Candidates, max_nodes: int) -> Nodes:
    """The single best path: at every position the likeliest child of the one before."""
    nodes: Nodes = []
    rank = 0
    for position in range(min(candidates.num_positions, max_nodes)):
        rank = int(np.argmax(candidates.child_log_probs(position, rank)))
        nodes.append((position, int(candidates.token_ids[position, rank])))
    return nodes


def grow_tree(candidates: Candidates, num_nodes: int) -> Nodes:
    """The `num_nodes` likeliest nodes, best first; a node's score is the sum of log-probabilities on its path.

    The heap holds, for every node taken, its best child not yet taken. Taking a child puts back its next sibling and
    its own first child, so at most two entries are added per node.
    """
    nodes: Nodes = []
    heap: list[tuple[float, int, int, int, int]] = []  # (-score, order, parent index, position, rank among siblings)
    families: list[tuple[np.ndarray, np.ndarray, float]] = []  # per node: children by score, their scores, own score

    def open_family(position: int, parent_rank: int, score: float) -> None:
        if position < candidates.num_positions:
            log_probs = candidates.child_log_probs(position, parent_rank)
            families.append((np.argsort(-log_probs, kind="stable"), log_probs, score))
            push(len(families) - 1, position, sibling=0)
        else:
            families.append((np.empty(0, np.int64), np.empty(0, np.float32), score))

    def push(parent: int, position: int, sibling: int) -> None:
        order, log_probs, score = families[parent]
        if sibling < len(order):
            child_score = score + float(log_probs[order[sibling]])
            heapq.heappush(heap, (-child_score, len(nodes), parent, position, sibling))

    open_family(0, 0, 0.0)
    while heap and len(nodes) < num_nodes:
        negative_score, _, parent, position, sibling = heapq.heappop(heap)
        rank = int(families[parent][0][sibling])
        nodes.append((parent, int(candidates.token_ids[position, rank])))
        push(parent, position, sibling=sibling + 1)
        open_family(position + 1, rank, -negative_score)
    return nodes
