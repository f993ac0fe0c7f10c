"""Growing draft trees out of a drafter's candidates, or pruning the tree that the drafter grew itself.

Every way to order nodes is a stream of (probability that the node's whole path is right, parent, token id), likeliest
first, parents before children. `grow_chain` and `grow_tree` take a number of nodes from a stream; `grow_by_cost` takes
as many as bring the most tokens per millisecond. Out of candidates, `compiled/` grows the same without a stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from itertools import islice, tee
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.candidates import FLOAT, INT, Candidates, CandidateStack, FloatArray, IntArray, ProposedTree
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Nodes
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.forecast import HEAD

Stream = Iterator[tuple[float, int, int]]
Values = NDArray[np.float64]
NO_FIRST, NO_PAIRS = np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32)
NO_WEIGHTS = np.zeros((0, 0), np.float32)
ROUNDING = 1e-12


class Growth(NamedTuple):
    """Nodes behind an anchor, parents first; the anchor is parent 0."""

    parents: Sequence[int]
    token_ids: Sequence[int]
    depths: Sequence[int]
    depth: int  # the largest; 0 without nodes
    promised: float  # tokens that they bring if their probabilities are right; the target's own comes on top

    @property
    def nodes(self) -> Nodes:
        return list(zip(self.parents, self.token_ids, strict=True))

    def tree(self, anchor_id: int) -> DraftTree:
        """Behind that anchor, as many nodes as one check takes."""
        if len(self.parents) > MAX_TREE_NODES:
            return DraftTree.build(anchor_id, self.nodes[:MAX_TREE_NODES])
        return DraftTree((anchor_id, *self.token_ids), (-1, *self.parents), (0, *self.depths))


class Forest(NamedTuple):
    """What was grown at once for many requests; see `Growth`."""

    trees: list[DraftTree]  # as many nodes as one check takes
    checked: list[tuple[int, float]]  # depth and promised
    heads: list[list[float]]  # how likely each draft's best chain is right up to its first `HEAD` positions


def grow_chain(candidates: Candidates, max_nodes: int) -> Nodes:
    """The single best path: at every position the likeliest child of the one before."""
    if candidates.tree is not None:
        return [(parent, token_id) for _, parent, token_id in islice(proposed_chain(candidates.tree), max_nodes)]
    compiled = switch.load_compiled()
    if compiled is not None:
        return list(enumerate(compiled.best_chain(*_plain_arrays(candidates), max_nodes).tolist()))
    nodes: Nodes = []
    rank = 0
    for position, children in enumerate(candidates.best_children()[:max_nodes]):
        rank = children[rank]
        nodes.append((position, candidates.token_ids.item(position, rank)))
    return nodes


def grow_tree(candidates: Candidates, num_nodes: int, depth: int | None = None) -> Nodes:
    """The `num_nodes` likeliest nodes, best first; none below `depth`, unless the drafter grew the tree itself."""
    depth = candidates.num_positions if depth is None else min(candidates.num_positions, depth)
    compiled = switch.load_compiled()
    if compiled is not None and candidates.tree is None:
        ids, log_probs, first, pairwise = _plain_arrays(candidates)
        shares = (
            (np.exp(log_probs), first, pairwise) if not len(first) else (log_probs, np.exp(first), np.exp(pairwise))
        )
        shape = candidates.width, depth
        found = np.empty((3, num_nodes + 1), INT)
        count, *_ = compiled.grow(found, ids, *shares, NO_WEIGHTS, *falling_costs(num_nodes), 1.0, *shape, False)
        return list(zip(*found[:2, 1 : count + 1].tolist(), strict=True))
    return [(parent, token_id) for _, parent, token_id in islice(_tree_stream(candidates, depth), num_nodes)]


def grow_by_cost(
    stream: Stream, step_ms: Sequence[float], trust: float = 1.0, rises: Sequence[float] | None = None
) -> Growth:
    """As many nodes as maximise expected tokens / milliseconds; `step_ms[n]` is a step that checks n nodes.

    All probabilities count `trust` times. Costs may rise in stairs, so the best number may lie behind a dip. With n
    nodes taken and the best rate r so far, m more can win only if their probabilities exceed r * (step_ms[n + m] -
    step_ms[n]). None exceeds the next node's, so growth ends when that lies below r * the smallest rise per node: one
    of `rises`, which are `smallest_rises(step_ms)` where the caller knows them already.
    """
    if rises is None:
        rises = smallest_rises(np.array(step_ms)).tolist()
    nodes: Nodes = []
    promised = best_promised = 0.0
    best_rate, best_count = 1.0 / step_ms[0], 0
    for count, (probability, parent, token_id) in enumerate(islice(stream, len(rises)), start=1):
        if trust * probability <= best_rate * rises[count - 1]:
            break
        nodes.append((parent, token_id))
        promised += probability
        rate = (1 + trust * promised) / step_ms[count]
        if rate > best_rate:
            best_rate, best_count, best_promised = rate, count, promised
    parents, token_ids = [[node[part] for node in nodes[:best_count]] for part in (0, 1)]
    depths = _depths(parents)
    return Growth(parents, token_ids, depths, max(depths, default=0), best_promised)


def grow_calibrated(
    candidates: Candidates,
    calibration: Calibration,
    costs: tuple[Values, Values],
    *,
    trust: float,
    depth: int,
    width: int,
    is_chain: bool,
) -> tuple[Growth, Sequence[float]]:
    """`grow_by_cost` of a draft down to `depth`, and how likely its best chain is right up to each of `HEAD` positions.

    `costs` are the milliseconds of a step and their smallest rises.
    """
    compiled = switch.load_compiled()
    if compiled is None or candidates.tree is not None:
        head, stream = _streams(candidates, calibration, depth, width, is_chain=is_chain)
        paths = [path for path, _, _ in islice(head, HEAD)]
        return grow_by_cost(stream, costs[0].tolist(), trust, costs[1].tolist()), paths
    found, shape = np.empty((3, len(costs[0])), INT), (min(candidates.width, width), depth)
    count, deepest, promised, paths = compiled.grow(
        found, *_plain_arrays(candidates), calibration.plain_weights, *costs, trust, *shape, is_chain
    )
    parents, token_ids, depths = found[:, 1 : count + 1].tolist()
    return Growth(parents, token_ids, depths, deepest, promised), paths[:depth]


def grow_stacked(
    stack: CandidateStack,
    requests: Sequence[tuple[int, int, int]],
    weights: FloatArray,
    costs: tuple[Values, Values],
    *,
    trust: float,
    width: int,
    is_chain: bool,
) -> Forest:
    """Compiled growth for many requests: (row of the stack, anchor's token id, depth) each.

    With the weights of a calibration this is `grow_calibrated`; without any, scores are probabilities already.
    """
    compiled = switch.load_compiled()
    assert compiled is not None
    num_requests, size = len(requests), len(costs[0])
    found, shapes = np.empty((num_requests, 3, size), INT), np.empty((2, num_requests), INT)
    promised, heads = np.empty(num_requests), np.empty((num_requests, HEAD))
    arrays = np.array(requests, INT), stack.token_ids, stack.log_probs, stack.first, stack.pairwise, weights
    compiled.grow_stacked(found, shapes, promised, heads, *arrays, *costs, trust, width, is_chain)
    counts, depths = shapes.tolist()
    trees = []
    for count, (parents, token_ids, node_depths) in zip(counts, found.tolist(), strict=True):
        end = min(count, MAX_TREE_NODES) + 1
        if end < size:
            parents, token_ids, node_depths = parents[:end], token_ids[:end], node_depths[:end]
        trees.append(DraftTree(tuple(token_ids), tuple(parents), tuple(node_depths)))
    paths = heads.tolist()
    if min(depth for _, _, depth in requests) < HEAD:
        paths = [head[:depth] for head, (_, _, depth) in zip(paths, requests, strict=True)]
    return Forest(trees, list(zip(depths, promised.tolist(), strict=True)), paths)


def exponentials(stack: CandidateStack, num_rows: int) -> CandidateStack:
    """Probabilities of the first rows instead of their logarithms, as far as `grow_stacked` reads them."""
    if stack.first.shape[1]:
        return replace(stack, first=np.exp(stack.first[:num_rows]), pairwise=np.exp(stack.pairwise[:num_rows]))
    return replace(stack, log_probs=np.exp(stack.log_probs[:num_rows]))


def smallest_rises(step_ms: Values) -> Values:
    """For n = 0, 1, ..: the least that nodes from n on, however many, add to a step's milliseconds per node.

    A little less, so that growth does not end where rounding alone decides.
    """
    distances, is_more = _distances(len(step_ms))
    rises = (step_ms - step_ms[:-1, None]) / distances  # [from, to]
    smallest: Values = rises.min(axis=1, where=is_more, initial=np.inf) - ROUNDING * step_ms[-1]
    return smallest


@lru_cache
def _distances(count: int) -> tuple[Values, NDArray[np.bool_]]:
    """From 0, 1, .. nodes to all numbers below `count` [count - 1, count], and which of these are more."""
    numbers = np.arange(float(count))
    ahead = numbers - numbers[:-1, None]
    return np.where(ahead > 0, ahead, 1.0), ahead > 0


@lru_cache
def falling_costs(num_nodes: int) -> tuple[Values, Values]:
    """Costs at which every further node pays, and their smallest rises."""
    step_ms = 1 / np.arange(1.0, num_nodes + 2)
    return step_ms, smallest_rises(step_ms)


def best_first(first: FloatArray, later: FloatArray, token_ids: IntArray) -> Stream:
    """All paths through probabilities `first` [K] and `later` [D-1, K, K] of the tokens [D, K].

    The heap holds, for every node taken, its best child not yet taken. Taking a child puts back its next sibling and
    its own first child, so at most two entries are added per node. Equal paths come in the order of their age, equal
    siblings in the order of their ranks.
    """
    if not len(token_ids):
        return
    ids, last, width = token_ids.tolist(), len(token_ids) - 1, len(first)
    row = first.tolist()
    ordered = sorted(row, reverse=True)
    families: dict[int, tuple[list[float], list[float]]] = {}  # parent -> its children by rank, and best first
    # (-path, age, parent, position, sibling, first rank it may have, parent's path, siblings by rank, and best first)
    heap = [(-ordered[0], 0, 0, 0, 0, 0, 1.0, row, ordered)]
    age = taken = 0
    while heap:
        negative, _, parent, position, sibling, start, above, row, ordered = heap[0]
        share = ordered[sibling]
        rank = row.index(share, start)
        yield -negative, parent, ids[position][rank]
        taken += 1
        age += 2
        sibling += 1
        if sibling < width:
            start = rank + 1 if ordered[sibling] == share else 0
            path = -above * ordered[sibling]
            heapreplace(heap, (path, age, parent, position, sibling, start, above, row, ordered))
        else:
            heappop(heap)
        if position < last:
            place = position * width + rank
            if place not in families:
                row = later[position, rank].tolist()
                families[place] = row, sorted(row, reverse=True)
            row, ordered = families[place]
            heappush(heap, (negative * ordered[0], age + 1, taken, position + 1, 0, 0, -negative, row, ordered))


def likeliest_chain(first: FloatArray, later: FloatArray, token_ids: IntArray) -> Stream:
    """The path that takes the likeliest child at every position; arguments as for `best_first`."""
    path, row = 1.0, first
    for position in range(len(token_ids)):
        probabilities = row.tolist()
        best = max(probabilities)
        rank = probabilities.index(best)
        path *= best
        yield path, position, token_ids.item(position, rank)
        if position < len(later):
            row = later[position, rank]


def proposed_nodes(tree: ProposedTree) -> Stream:
    """A drafter's own tree by path score. No child outscores its parent and ties keep the order: parents come first."""
    scores = tree.path_scores()
    paths, parents, token_ids = np.exp(scores).tolist(), tree.parents.tolist(), tree.token_ids.tolist()
    places = [0] * (len(tree) + 1)
    for place, index in enumerate(np.argsort(-scores, kind="stable").tolist(), start=1):
        places[index + 1] = place
        yield paths[index], places[parents[index]], token_ids[index]


def proposed_chain(tree: ProposedTree) -> Stream:
    """The likeliest path of a drafter's own tree."""
    log_probs = tree.log_probs.tolist()
    best: dict[int, int] = {}  # parent -> its likeliest child, the first of equals
    for node, parent in enumerate(tree.parents.tolist(), start=1):
        if parent not in best or log_probs[node - 1] > log_probs[best[parent] - 1]:
            best[parent] = node
    path, at, place = 1.0, 0, 0
    shares = np.exp(np.minimum(tree.log_probs, 0))
    while at in best:
        at = best[at]
        path *= shares.item(at - 1)
        yield path, place, tree.token_ids.item(at - 1)
        place += 1


def _plain_arrays(candidates: Candidates) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
    """The arrays themselves, or copies in the one form that `compiled/` is compiled for."""
    first, pairwise = candidates.first, candidates.pairwise
    if first is None or pairwise is None:
        first, pairwise = NO_FIRST, NO_PAIRS
    if candidates.is_plain:
        return candidates.token_ids, candidates.log_probs, first, pairwise
    log_probs, first, pairwise = (np.array(part, FLOAT, order="C") for part in (candidates.log_probs, first, pairwise))
    return np.array(candidates.token_ids, INT, order="C"), log_probs, first, pairwise


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def _streams(
    candidates: Candidates, calibration: Calibration, depth: int, width: int, *, is_chain: bool
) -> tuple[Stream, Stream]:
    """The draft's likeliest chain, and the nodes to choose from."""
    if candidates.tree is not None:  # grown by the drafter: pruned as it is scored
        head, chain = tee(proposed_chain(candidates.tree))
        return head, chain if is_chain else proposed_nodes(candidates.tree)
    given = (*calibration.probabilities(candidates, width), candidates.token_ids[:depth])
    head, chain = tee(likeliest_chain(*given))
    return head, chain if is_chain else best_first(*given)


def _tree_stream(candidates: Candidates, depth: int) -> Stream:
    if candidates.tree is not None:
        return proposed_nodes(candidates.tree)
    return best_first(*_scores(candidates), candidates.token_ids[:depth])


def _scores(candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """The drafter's own probabilities, as they are."""
    if candidates.pairwise is not None and candidates.first is not None:
        return np.exp(candidates.first), np.exp(candidates.pairwise)
    size = candidates.width
    probabilities = np.exp(candidates.log_probs)
    later = np.broadcast_to(probabilities[1:, None], (max(len(probabilities) - 1, 0), size, size))
    return probabilities[0] if len(probabilities) else probabilities.reshape(-1), later
