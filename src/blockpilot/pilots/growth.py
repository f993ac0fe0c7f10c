"""Growing draft trees out of a drafter's candidates, or pruning the tree that the drafter grew itself.

Every way to order nodes is a stream of (probability that the node's whole path is right, parent, token id), likeliest
first, parents before children. `grow_chain` and `grow_tree` take a number of nodes from a stream; `grow_by_cost` takes
as many as bring the most tokens per millisecond. Out of candidates, `compiled.py` grows the same without a stream.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from itertools import islice, tee
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.candidates import Candidates, FloatArray, IntArray, ProposedTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Nodes
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.forecast import HEAD

Stream = Iterator[tuple[float, int, int]]
Values = NDArray[np.float64]
FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)
NO_FIRST, NO_PAIRS = np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32)
NO_WEIGHTS = np.zeros((0, 0), np.float32)


class Growth(NamedTuple):
    nodes: Nodes
    promised: float  # tokens that they bring if their probabilities are right; the target's own comes on top
    depth: int


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


def grow_tree(candidates: Candidates, num_nodes: int) -> Nodes:
    """The `num_nodes` likeliest nodes, best first."""
    compiled = switch.load_compiled()
    if compiled is not None and candidates.tree is None:
        ids, log_probs, first, pairwise = _plain_arrays(candidates)
        shares = (
            (np.exp(log_probs), first, pairwise) if not len(first) else (log_probs, np.exp(first), np.exp(pairwise))
        )
        shape = candidates.width, candidates.num_positions
        nodes, *_ = compiled.grow(ids, *shares, NO_WEIGHTS, *falling_costs(num_nodes), 1.0, *shape, False)
        return list(zip(*nodes.tolist(), strict=True))
    return [(parent, token_id) for _, parent, token_id in islice(_tree_stream(candidates), num_nodes)]


def grow_by_cost(
    stream: Stream, step_ms: Sequence[float], trust: float = 1.0, rises: Sequence[float] | None = None
) -> Growth:
    """As many nodes as maximise expected tokens / milliseconds; `step_ms[n]` is a step that checks n nodes.

    All probabilities count `trust` times. Costs may rise in stairs, so the best number may lie behind a dip. With n
    nodes taken and the best rate r so far, m more can win only if their probabilities exceed r * (step_ms[n + m] -
    step_ms[n]). None exceeds the next node's, so growth ends when that lies below r * the smallest later rise: one of
    `rises`, which are `smallest_rises(step_ms)` where the caller knows them already.
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
    return Growth(nodes[:best_count], best_promised, _depth(nodes[:best_count]))


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
    arrays, weights = _plain_arrays(candidates), plain_array(calibration.weights, FLOAT)
    shape = min(candidates.width, width), depth
    nodes, promised, deepest, paths = compiled.grow(*arrays, weights, *costs, trust, *shape, is_chain)
    return Growth(list(zip(*nodes.tolist(), strict=True)), promised, deepest), paths[:depth]


def smallest_rises(step_ms: Values) -> Values:
    """For n = 0, 1, ..: the least that any single node from n on adds to a step's milliseconds."""
    return np.minimum.accumulate((step_ms[1:] - step_ms[:-1])[::-1])[::-1].copy()


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


def plain_array(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array itself, or a copy in the one form that `compiled.py` is compiled for."""
    return array if array.dtype is dtype and array.flags.carray else np.array(array, dtype=dtype, order="C")


def _plain_arrays(candidates: Candidates) -> tuple[NDArray[Any], ...]:
    token_ids, log_probs = plain_array(candidates.token_ids, INT), plain_array(candidates.log_probs, FLOAT)
    if candidates.pairwise is None or candidates.first is None:
        return token_ids, log_probs, NO_FIRST, NO_PAIRS
    first, pairwise = plain_array(candidates.first, FLOAT), plain_array(candidates.pairwise, FLOAT)
    return token_ids, log_probs, first, pairwise


def _depth(nodes: Nodes) -> int:
    depths = [0]
    for parent, _ in nodes:
        depths.append(depths[parent] + 1)
    return max(depths)


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
