"""Growing draft trees out of a drafter's candidates, or pruning the tree that the drafter grew itself."""

import heapq

import numpy as np

from blockpilot.core.candidates import Candidates, ProposedTree
from blockpilot.pilots.base import Nodes


def grow_chain(candidates: Candidates, max_nodes: int) -> Nodes:
    """The single best path: at every position the likeliest child of the one before."""
    if candidates.tree is not None:
        return _likeliest_path(candidates.tree, max_nodes)
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
    if candidates.tree is not None:
        return _best_nodes(candidates.tree, num_nodes)
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


def _likeliest_path(tree: ProposedTree, max_nodes: int) -> Nodes:
    nodes: Nodes = []
    at = 0
    while len(nodes) < max_nodes:
        children = np.flatnonzero(tree.parents == at)
        if not len(children):
            break
        best = int(children[np.argmax(tree.log_probs[children])])
        nodes.append((len(nodes), int(tree.token_ids[best])))
        at = best + 1
    return nodes


def _best_nodes(tree: ProposedTree, num_nodes: int) -> Nodes:
    """The best-scored nodes. No child outscores its parent and ties keep the order: every parent is in, and first."""
    chosen = np.argsort(-tree.path_scores(), kind="stable")[:num_nodes]
    renamed = {0: 0} | {int(index) + 1: place for place, index in enumerate(chosen, start=1)}
    return [(renamed[int(tree.parents[index])], int(tree.token_ids[index])) for index in chosen]
