"""Draft trees on the device: grown between draft and check, accepted behind it, with no host in between.

Growth takes one node after the other, and one warp does it with what it has in registers. All it reads in the loop are
links, which `_link_families` has prepared for every parent at once: its best child, and behind every child the next
best. A link is one integer, a share's bits over a rank; for numbers that are not negative the order of the bits is the
order of the numbers. It is negative where there is no such child.

Nodes that may be taken next have an entry each, node n's next sibling at 2n and its first child at 2n + 1, so that what
stands first is older. An entry is one integer, too. From the highest bit on:

    9  age, the place where it stands     8  parent     6  position     4  rank of the parent     4  rank

The largest of all paths, then the smallest of the entries that have it: on a GPU two instructions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.core.draft import Draft
from blockpilot.gpu.interface import AcceptedRows, CheckedTrees, NextBlocks, PassInputs, TreeLimits, TreeRules
from blockpilot.gpu.kernels.launching import launch, wait
from blockpilot.pilots import calibration
from blockpilot.pilots.forecast import HEAD
from blockpilot.pilots.growth import MAX_WIDTH

MAX_NODES, MAX_POSITIONS = 128, 63  # what an entry has bits for, and for 16 candidates
MIN_NODES = 32  # a lane for each
MIN_LOG_PROB = tl.constexpr(calibration.MIN_LOG_PROB)
MAX_PROBABILITY = tl.constexpr(calibration.MAX_PROBABILITY)
MAX_NEGATED = tl.constexpr(calibration.MAX_NEGATED)
LAST_RANK = tl.constexpr(MAX_WIDTH - 1)
NO_ENTRY = tl.constexpr(0x7FFFFFFF)
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def _calibrate(scores, marginals, ranks, is_rank, weight):  # type: ignore[no-untyped-def]
    """From scores [parents, children] to P(right | parent right), with the six weights of a position."""
    scores = tl.where(is_rank[None, :], tl.maximum(scores, MIN_LOG_PROB), MIN_LOG_PROB)
    rows = tl.log(ranks.to(tl.float32) + 1.0)
    logits = tl.load(weight + 1) * (scores - tl.log(1.0 - tl.minimum(tl.exp(scores), MAX_PROBABILITY)))
    logits += tl.load(weight) + tl.load(weight + 4) * rows[None, :] + tl.load(weight + 5) * rows[:, None]
    logits += tl.load(weight + 2) * tl.maximum(marginals, MIN_LOG_PROB)[None, :]
    logits += tl.load(weight + 3) * (tl.max(scores, axis=1)[:, None] - scores)
    shares = 1.0 / (1.0 + tl.exp(tl.minimum(-logits, MAX_NEGATED)))
    total = tl.sum(tl.where(is_rank[None, :], shares, 0.0), axis=1)
    return shares / tl.maximum(total, 1.0)[:, None]  # siblings exclude each other


@triton.jit  # type: ignore[untyped-decorator]
def _link_families(  # type: ignore[no-untyped-def]
    log_probs, first, pairwise, weights, temperatures, best, following, num_depths,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Orders the children of every parent at one position. At the first, the anchor (parent 0) is the only one."""
    wait(IS_OVERLAPPED)
    request, position = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = request * tl.num_programs(1) + position
    ranks = tl.arange(0, PAD)
    is_rank = ranks < WIDTH
    is_pair = is_rank[:, None] & is_rank[None, :]
    marginals = tl.load(log_probs + place * WIDTH + ranks, mask=is_rank, other=0.0)
    scores = marginals[None, :] + tl.zeros([PAD, PAD], tl.float32)
    if HAS_PAIRS:
        if position > 0:
            pairs = (place - request - 1) * WIDTH * WIDTH + ranks[:, None] * WIDTH + ranks[None, :]
            scores = tl.load(pairwise + pairs, mask=is_pair, other=0.0)
        else:
            pairs = request * WIDTH + ranks[:, None] * 0 + ranks[None, :]
            scores = tl.load(first + pairs, mask=is_pair, other=0.0)
    if HAS_WEIGHTS:
        is_sampled = (tl.load(temperatures + request) > 0).to(tl.int32)
        row = is_sampled * num_depths + tl.minimum(position, num_depths - 1)
        shares = _calibrate(scores, marginals, ranks, is_rank, weights + row * 6)
    else:
        shares = tl.exp(scores)
    bits = shares.to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(is_pair, (bits << 32) | (ranks ^ LAST_RANK)[None, :], -1)  # of equals the first is the greatest
    is_behind = keys[:, None, :] < keys[:, :, None]
    after = tl.max(tl.where(is_behind, keys[:, None, :], -1), axis=2)
    parents = place * WIDTH + ranks
    tl.store(best + parents, tl.max(keys, axis=1) ^ LAST_RANK, mask=is_rank)
    tl.store(following + parents[:, None] * WIDTH + ranks[None, :], after ^ LAST_RANK, mask=is_pair)


@triton.jit
def _follow(path, link):  # type: ignore[no-untyped-def]
    """The bits of a path with one more share; negative where there is no link."""
    share = (link >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    longer = path.to(tl.float32, bitcast=True) * share
    return tl.where(link < 0, -1, longer.to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _walk_head(best, depth, places, WIDTH: tl.constexpr, HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """How likely the best chain is right up to each of its first positions, at their places; elsewhere 0."""
    paths = tl.zeros(places.shape, tl.float32)
    path, row = tl.full([], ONE, tl.int32), 0
    for position in tl.static_range(HEAD):
        link = tl.load(best + position * WIDTH + row, mask=position < depth, other=-1)
        path, row = _follow(path, link), (link & LAST_RANK).to(tl.int32)
        paths = tl.where((places == position) & (position < depth), path.to(tl.float32, bitcast=True), paths)
    return paths


@triton.jit
def _bits_of(nodes, words):  # type: ignore[no-untyped-def]
    """Each node's bit in a row of words."""
    return tl.where((nodes >> 5)[:, None] == words[None, :], 1 << (nodes & 31)[:, None], 0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_positions", "count", "anchor_stride", "start_stride"]
)
def _grow(  # type: ignore[no-untyped-def]
    candidates, best, following, limits, anchors, starts, token_ids, positions, masks, branches, first_rows, parents,
    report,
    num_positions, count, anchor_stride, start_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, WORDS: tl.constexpr, PAD_WORDS: tl.constexpr, HEAD: tl.constexpr,
    IS_CHAIN: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    request = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limits + request * 2), count - 1)
    depth = tl.minimum(tl.load(limits + request * 2 + 1), num_positions)
    candidates += request * num_positions * WIDTH
    best += request * num_positions * WIDTH
    following += request * num_positions * WIDTH * WIDTH
    numbers = tl.arange(0, 8)
    told = _walk_head(best, depth, numbers - 3, WIDTH, HEAD)

    ages, nodes = tl.arange(0, 2 * PAD), tl.arange(0, PAD)
    link = tl.load(best, mask=depth > 0, other=-1)
    paths = tl.where(ages == 1, (link >> 32).to(tl.int32), -1)
    entries = tl.where(ages == 1, (1 << 22) | (link & LAST_RANK).to(tl.int32), NO_ENTRY)
    node_paths = tl.where(nodes == 0, ONE, 0)
    taken = tl.zeros([PAD], tl.int32)  # the entries of nodes 1, 2 ..
    node, promised = 1, 0.0
    path = tl.max(paths, axis=0)
    while (path >= 0) & (node <= limit):
        entry = tl.min(tl.where(paths == path, entries, NO_ENTRY), axis=0)
        position, row, rank = (entry >> 8) & 63, (entry >> 4) & 15, entry & 15
        link = tl.load(best + (position + 1) * WIDTH + rank, mask=position + 1 < depth, other=-1)
        paths = tl.where(entries == entry, -1, paths)
        if not IS_CHAIN:
            sibling = tl.load(following + (position * WIDTH + row) * WIDTH + rank)
            above = tl.max(tl.where(nodes == ((entry >> 14) & 255), node_paths, 0), axis=0)
            opened = (node << 23) | (entry & 0x3FFFF0) | (sibling & LAST_RANK).to(tl.int32)
            paths = tl.where(ages == 2 * node, _follow(above, sibling), paths)
            entries = tl.where(ages == 2 * node, opened, entries)
        opened = ((2 * node + 1) << 22) | (node << 14) | ((position + 1) << 8) | (rank << 4)
        paths = tl.where(ages == 2 * node + 1, _follow(path, link), paths)
        entries = tl.where(ages == 2 * node + 1, opened | (link & LAST_RANK).to(tl.int32), entries)
        node_paths = tl.where(nodes == node, path, node_paths)
        taken = tl.where(nodes == node - 1, entry, taken)
        promised += path.to(tl.float32, bitcast=True)
        node += 1
        path = tl.max(paths, axis=0)

    is_taken = nodes < node - 1
    is_token = nodes < count - 1
    position, parent = (taken >> 8) & 63, tl.where(is_taken, (taken >> 14) & 255, 0)
    depths = tl.where(is_taken, position + 1, 0)
    ids = tl.load(candidates + position * WIDTH + (taken & 15), mask=is_taken, other=0).to(tl.int32)
    anchor, start = tl.load(anchors + request * anchor_stride), tl.load(starts + request * start_stride)
    first = request * count
    tl.store(first_rows + request, start)
    tl.store(branches + request, (tl.max(depths, axis=0) < node - 1).to(tl.int32))
    tl.store(token_ids + first, anchor)
    tl.store(positions + first, start)
    tl.store(parents + first, -1)
    tl.store(token_ids + first + 1 + nodes, ids, mask=is_token)
    tl.store(positions + first + 1 + nodes, start + depths, mask=is_token)
    tl.store(parents + first + 1 + nodes, tl.where(is_taken, parent, -1), mask=is_token)

    deepest = tl.max(depths, axis=0)
    told = tl.where(numbers == 0, 1.0 * node, told)
    told = tl.where(numbers == 1, deepest.to(tl.float32), told)
    told = tl.where(numbers == 2, promised, told)
    tl.store(report + request * (3 + HEAD) + numbers, told, mask=numbers < 3 + HEAD)

    words = tl.arange(0, PAD_WORDS)
    is_word = words < WORDS
    seen = _bits_of(tl.where(is_taken, nodes + 1, 0), words) | tl.where(words == 0, 1, 0)[None, :]
    above = parent
    for _ in range(1, deepest):
        seen |= _bits_of(above, words)
        above = tl.where(above > 0, tl.gather(parent, tl.maximum(above - 1, 0), 0), 0)
    tl.store(masks + first * WORDS + words, tl.where(words == 0, 1, 0), mask=is_word)
    places = (first + 1 + nodes)[:, None] * WORDS + words[None, :]
    tl.store(masks + places, seen, mask=is_token[:, None] & is_word[None, :])


@triton.jit(do_not_specialize=["spare_slot", "count", "width", "num_rows", "start_stride"])  # type: ignore[untyped-decorator]
def _accept(  # type: ignore[no-untyped-def]
    best, token_ids, parents, starts, paths, counts, rows, positions, accepted, slots, block_positions, next_ids,
    next_positions, next_starts, spare_slot, count, width, num_rows, start_stride,
    PAD: tl.constexpr, PAD_PATH: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    request = tl.program_id(0)
    first = request.to(tl.int64) * count
    nodes, steps = tl.arange(0, PAD), tl.arange(0, PAD_PATH)
    is_node = nodes < count
    above = tl.load(parents + first + nodes, mask=is_node, other=-1)
    ids = tl.load(token_ids + first + nodes, mask=is_node, other=0)
    wanted = tl.load(best + first + tl.maximum(above, 0), mask=is_node, other=0).to(tl.int32)
    above = tl.where(ids == wanted, above, -1)  # only nodes that are right if their parents are
    path = tl.zeros([PAD_PATH], tl.int32)
    length = 1
    node = tl.min(tl.where(above == 0, nodes, PAD), axis=0)
    while (node < PAD) & (length < PAD_PATH):  # the second part ends what is no tree, as when a pass is recorded
        path = tl.where(steps == length, node, path)
        length += 1
        node = tl.min(tl.where(above == node, nodes, PAD), axis=0)
    is_step = steps < length
    emitted = tl.load(best + first + path, mask=is_step, other=0).to(tl.int32)
    tl.store(paths + request.to(tl.int64) * width + steps, path, mask=steps < width)
    tl.store(counts + request, length)
    own, is_row = request.to(tl.int64) * num_rows, steps < num_rows
    tl.store(rows + own + steps, request * count + path, mask=is_row)
    start = tl.load(starts + request * start_stride)
    tl.store(positions + own + steps, start + steps, mask=is_row)
    tl.store(accepted + own + request, length)
    tl.store(accepted + own + request + 1 + steps, emitted, mask=is_row)
    shift = tl.where(tl.load(slots + request) == spare_slot, 0, length)
    last = tl.load(block_positions + own + steps, mask=is_row, other=0)
    tl.store(next_positions + own + steps, last + shift, mask=is_row)
    tl.store(next_ids + own, tl.sum(tl.where(steps == length - 1, emitted, 0), axis=0))
    tl.store(next_starts + request, start + shift)


def grow_trees(
    draft: Draft[Tensor], rules: TreeRules, limits: TreeLimits, trees: PassInputs, parents: Tensor, report: Tensor
) -> None:
    (num_requests, num_positions, width), count = draft.token_ids.shape, parents.shape[1]
    assert count <= MAX_NODES + 1 and num_positions <= MAX_POSITIONS and width <= MAX_WIDTH
    best = torch.empty(num_requests, num_positions, width, dtype=torch.int64, device=parents.device)
    following = torch.empty(num_requests, num_positions, width, width, dtype=torch.int64, device=parents.device)
    pairs = None if draft.first is None or draft.pairwise is None else (draft.first, draft.pairwise)
    weights = rules.weights
    launch(_link_families, (num_requests, num_positions), parents.device,
        draft.log_probs, *(pairs or (draft.log_probs, draft.log_probs)),
        draft.log_probs if weights is None else weights, limits.temperatures, best, following,
        1 if weights is None else weights.shape[1], WIDTH=width, PAD=triton.next_power_of_2(width),
        HAS_PAIRS=pairs is not None, HAS_WEIGHTS=weights is not None, num_warps=4,
    )  # fmt: skip
    assert trees.masks is not None and trees.branches is not None
    num_words = trees.masks.shape[1]
    launch(_grow, (num_requests,), parents.device,
        draft.token_ids, best, following, limits.limits, limits.anchors, limits.starts, trees.token_ids,
        trees.positions, trees.masks, trees.branches, trees.starts, parents, report, num_positions, count,
        limits.anchors.stride(0), limits.starts.stride(0), WIDTH=width,
        PAD=max(MIN_NODES, triton.next_power_of_2(count - 1)), WORDS=num_words,
        PAD_WORDS=triton.next_power_of_2(num_words), HEAD=HEAD, IS_CHAIN=rules.is_chain, num_warps=1,
    )  # fmt: skip


def accept_trees(checked: CheckedTrees, kept: AcceptedRows, accepted: Tensor, following: NextBlocks) -> None:
    parents, starts = checked.parents, checked.starts
    (num_requests, count), width = parents.shape, kept.paths.shape[1]
    num_rows = len(kept.rows) // num_requests
    launch(_accept, (num_requests,), parents.device,
        checked.best, checked.token_ids, parents, starts, *kept, accepted, following.slots, following.positions,
        following.next_ids, following.next_positions, following.next_starts, following.spare_slot, count, width,
        num_rows, starts.stride(0), PAD=max(MIN_NODES, triton.next_power_of_2(count)),
        PAD_PATH=max(MIN_NODES, triton.next_power_of_2(max(width, num_rows))), num_warps=1,
    )  # fmt: skip
