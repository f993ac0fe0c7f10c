"""Draft trees grown and accepted where the drafts are, in plain PyTorch: the truth for `gpu_kernels/trees.py`.

On a GPU the nodes of a tree can be picked and accepted with no host between draft and check. What is picked is what
`pilots/growth.py` picks if every further node pays, and what is accepted is what `decoding/verification.py` accepts.
Paths are float32 here and float64 there, so nodes with nearly equal paths may come in another order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HEAD = 3  # positions of the likeliest chain that a report names, as `pilots/forecast.py` reads them
MIN_LOG_PROB, MAX_PROBABILITY, MAX_NEGATED = -30.0, 1 - 1e-4, 60.0  # see `pilots/calibration.py`
REPORT = 3 + HEAD  # numbers that are told of a tree
MAX_WIDTH = 16  # candidates of a position: what kernels take
WORD = 32


@dataclass(frozen=True)
class Blocks:
    """The candidates of R drafted blocks, as `core/candidates.py` describes those of one."""

    token_ids: Tensor  # [R, D, K] int64
    log_probs: Tensor  # [R, D, K] float32
    first: Tensor | None = None  # [R, K] float32
    pairwise: Tensor | None = None  # [R, D-1, K, K] float32


@dataclass(frozen=True)
class Trees:
    """What a check reads of R requests with n tokens each, in the device's memory or the host's; int32.

    Tokens behind a tree only round up: they have id 0, and stand and look where the anchor does.
    """

    token_ids: Tensor  # [R * n]
    positions: Tensor  # [R * n]
    masks: Tensor  # [R * n, words], a bit for each token of the request: its ancestors and itself
    starts: Tensor  # [R], where the request's rows begin: at its anchor's position


@dataclass(frozen=True)
class NextBlocks:
    """The blocks of m tokens that come after accepted ones: what the last were, and where the next are written; int32.

    A block moves on by as many tokens as were accepted, and begins with the last of them. Those of the spare slot stay.
    """

    slots: Tensor  # [R]
    positions: Tensor  # [R * m]
    spare_slot: int
    next_ids: Tensor  # [R * m], only each first one is written
    next_positions: Tensor  # [R * m]
    next_starts: Tensor  # [R]


class Node(NamedTuple):
    path: float  # how likely it and all above it are right
    parent: int
    depth: int
    rank: int


def grow_trees(
    blocks: Blocks, weights: Tensor | None, temperatures: Tensor, limits: Tensor, anchors: Tensor, starts: Tensor,
    trees: Trees, parents: Tensor, report: Tensor, *, is_chain: bool,
) -> None:  # fmt: skip
    """The likeliest nodes of each block, best first, into `trees` and `parents` [R, n]; -1 is no node's parent.

    `weights` [2, depths, 6] are the calibrations of greedy requests and of those with a temperature [R]; without them
    scores are taken at their word. `limits` [R, 2] are the most nodes and the greatest depth, `anchors` and `starts`
    [R] the anchors' ids and positions. `report` [R, REPORT] gets the number of tokens, the depth, the sum of the nodes'
    paths, and how likely the best chain is right up to each of its first positions. On a chain no node has a sibling.
    """
    all_shares = _shares(blocks, weights, temperatures)
    count = parents.shape[1]
    for request, (most_nodes, depth) in enumerate(limits.tolist()):
        shares, start = all_shares[request, :depth], int(starts[request])
        nodes = _best_first(shares, min(most_nodes, count - 1), is_chain=is_chain)
        chain = _best_first(shares, HEAD, is_chain=True)
        ids = [int(blocks.token_ids[request, node.depth - 1, node.rank]) for node in nodes]
        above = [-1, *(node.parent for node in nodes)]
        own = slice(request * count, (request + 1) * count)
        _write(trees.token_ids[own], [int(anchors[request]), *ids])
        _write(trees.positions[own], [start, *(start + node.depth for node in nodes)], start)
        trees.masks[own] = _masks(above, *trees.masks[own].shape).to(trees.masks.device)
        trees.starts[request] = start
        _write(parents[request], above, -1)
        deepest, promised = max((node.depth for node in nodes), default=0), sum(node.path for node in nodes)
        _write(report[request], [len(above), deepest, promised, *(node.path for node in chain)])


def accept_trees(
    best: Tensor, token_ids: Tensor, parents: Tensor, starts: Tensor, paths: Tensor, counts: Tensor, rows: Tensor,
    positions: Tensor, accepted: Tensor, blocks: NextBlocks,
) -> None:  # fmt: skip
    """Walk every tree [R * n] along the tokens `best` [R * n] that the target has after each node.

    The nodes on the way go to `paths` [R, W], the anchor first, their number to `counts` [R] and, with the m tokens
    that they emit, to `accepted` [R, 1 + m]. `rows` [R * m] name the nodes among those of all requests, the anchor
    where there are no more, and `positions` [R * m] the places behind each of `starts` [R], where a drafter's rows end.
    """
    num_requests, count = parents.shape
    num_rows = len(rows) // num_requests
    wanted, ids = best.view(num_requests, count).tolist(), token_ids.view(num_requests, count).tolist()
    for request, above in enumerate(parents.tolist()):
        path = [0]
        for node, parent in enumerate(above):  # children stand behind their parents
            if parent == path[-1] and ids[request][node] == wanted[request][parent]:
                path.append(node)
        anchor, own = request * count, slice(request * num_rows, (request + 1) * num_rows)
        _write(paths[request], path)
        counts[request] = len(path)
        _write(rows[own], [anchor + node for node in path[:num_rows]], anchor)
        _write(positions[own], range(int(starts[request]), int(starts[request]) + num_rows))
        _write(accepted[request], [len(path), *(wanted[request][node] for node in path[:num_rows])])
        shift = 0 if int(blocks.slots[request]) == blocks.spare_slot else len(path)
        blocks.next_ids[own][0] = wanted[request][path[-1]]
        blocks.next_positions[own] = (blocks.positions[own] + shift).to(blocks.next_positions.device)
        blocks.next_starts[request] = int(starts[request]) + shift


def _shares(blocks: Blocks, weights: Tensor | None, temperatures: Tensor) -> Tensor:
    """P(child | parent) [R, D, K, K] on a path that is right so far; the anchor is parent 0 of position 0."""
    num_requests, depth, width = blocks.log_probs.shape
    marginals = blocks.log_probs[:, :, None]  # [R, D, 1, K], the same after every parent
    scores = marginals.expand(num_requests, depth, width, width)
    if blocks.first is not None and blocks.pairwise is not None:
        first = blocks.first[:, None, None].expand(num_requests, 1, width, width)
        scores = torch.cat((first, blocks.pairwise), dim=1)
    if weights is None:
        return scores.exp()
    places = torch.arange(depth, device=weights.device).clamp(max=weights.shape[1] - 1)
    table = weights[(temperatures > 0).to(weights.device, torch.long)][:, places]  # [R, D, features]
    one, conditional, marginal, gap, child, parent = table[:, :, None, None].unbind(dim=-1)
    ranks = torch.arange(width, device=weights.device).float().log1p()
    scores = scores.clamp(min=MIN_LOG_PROB)
    logits = conditional * (scores - torch.log1p(-scores.exp().clamp(max=MAX_PROBABILITY)))
    logits = logits + one + child * ranks + parent * ranks[:, None] + marginal * marginals.clamp(min=MIN_LOG_PROB)
    logits = logits + gap * (scores.amax(dim=-1, keepdim=True) - scores)
    found = 1 / (1 + (-logits).clamp(max=MAX_NEGATED).exp())
    return found / found.sum(dim=-1, keepdim=True).clamp(min=1)  # siblings exclude each other


def _best_first(shares: Tensor, most_nodes: int, *, is_chain: bool) -> list[Node]:
    """As `pilots/growth.py: best_first`: equal paths in the order of their age, equal siblings in that of their ranks.

    A node that is taken opens its next sibling and its first child.
    """
    ordered = shares.sort(dim=-1, descending=True, stable=True)
    depth, width = shares.shape[:2]
    values, ranks = ordered.values.tolist(), ordered.indices.tolist()
    nodes: list[Node] = []
    # (-path, age, parent, its path, position, rank of the parent, place among the siblings)
    heap = [(-values[0][0][0], 0, 0, 1.0, 0, 0, 0)] if depth else []
    while heap and len(nodes) < most_nodes:
        negative, _, parent, above, position, row, place = heappop(heap)
        rank, path = ranks[position][row][place], -negative
        nodes.append(Node(path, parent, position + 1, rank))
        age = 2 * len(nodes)
        if place + 1 < width and not is_chain:
            sibling = _product(above, values[position][row][place + 1])
            heappush(heap, (-sibling, age, parent, above, position, row, place + 1))
        if position + 1 < depth:
            child = _product(path, values[position + 1][rank][0])
            heappush(heap, (-child, age + 1, len(nodes), path, position + 1, rank, 0))
    return nodes


def _product(path: float, share: float) -> float:
    return float(np.float32(path * share))


def _masks(parents: Sequence[int], count: int, num_words: int) -> Tensor:
    """[count, words] int32 of the tree's tokens, and of those behind it."""
    bits = [1]
    for node, parent in enumerate(parents[1:], start=1):
        bits.append(bits[parent] | 1 << node)
    bits += [1] * (count - len(bits))
    words = np.array([[number >> WORD * word & 0xFFFFFFFF for word in range(num_words)] for number in bits], np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _write(place: Tensor, numbers: Iterable[float], rest: float = 0) -> None:
    """Numbers into a row, and `rest` behind them."""
    found = torch.tensor(list(numbers), dtype=place.dtype)
    place.fill_(rest)
    place[: len(found)] = found.to(place.device)
