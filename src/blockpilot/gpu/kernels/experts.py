"""A layer whose tokens go through few of many experts: only the weights of chosen ones are read."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.device import has_large_memory
from blockpilot.gpu.interface import Experts, Norm, Parts
from blockpilot.gpu.kernels.launching import MIN_TILE, launch, wait
from blockpilot.gpu.kernels.products import can_norm, head_and_rest, linear, multiply_few
from blockpilot.gpu.kernels.sublayers import add_norm

MAX_HELD = 16384  # numbers of a token's experts that the registers of one program hold
MAX_BLOCK = 64  # tokens of an expert that one program takes
MAX_RANKED = 128  # experts that every program may rank by itself: the work grows with their square


@triton.jit  # type: ignore[untyped-decorator]
def _read_logits(logits, experts, part_stride, EXPERTS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Past the processor's own cache: a kernel may read them before it waits. What is not a number counts as lowest, so
    that ranks stay unique; its token ends as not a number all the same, by its shares."""
    is_expert = experts < EXPERTS
    total = tl.load(logits + experts, mask=is_expert, other=0.0, cache_modifier=".cg").to(tl.float32)
    for part in tl.static_range(1, PARTS):
        places = logits + part * part_stride + experts
        total += tl.load(places, mask=is_expert, other=0.0, cache_modifier=".cg").to(tl.float32)
    return tl.where(is_expert & (total == total), total, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _rank(  # type: ignore[no-untyped-def]
    logits, part_stride,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, PARTS: tl.constexpr, IS_NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Of one token: for every expert how many are better, and its share. Counting takes one reduction, choosing the
    best one by one two for each."""
    width: tl.constexpr = min(PAD, 32)
    experts = tl.arange(0, PAD)
    mine = _read_logits(logits, experts, part_stride, EXPERTS, PARTS)
    ahead = tl.zeros([PAD, width], tl.int32)
    for at in tl.static_range(0, PAD, width):
        others = at + tl.arange(0, width)
        theirs = _read_logits(logits, others, part_stride, EXPERTS, PARTS)
        is_tied = (theirs[None, :] == mine[:, None]) & (others[None, :] < experts[:, None])
        ahead += ((theirs[None, :] > mine[:, None]) | is_tied).to(tl.int32)
    ranks = tl.sum(ahead, axis=1)
    masses = tl.exp(mine - tl.max(mine, axis=0))
    total = tl.sum(tl.where(ranks < ACTIVE, masses, 0.0), axis=0) if IS_NORMALIZED else tl.sum(masses, axis=0)
    return ranks, masses / total


@triton.jit  # type: ignore[untyped-decorator]
def _first_of_token(  # type: ignore[no-untyped-def]
    x, logits, weight, middle, num_rows, size,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    REST: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of the gate and of the up projection of one chosen expert."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # only now: the next kernel reads the logits before it waits
    ranks, _ = _rank(logits, 0, EXPERTS, PAD, ACTIVE, 1, False)
    chosen = tl.sum(tl.where(ranks == tl.program_id(1), tl.arange(0, PAD), 0), axis=0)
    expert = tl.minimum(chosen, EXPERTS - 1).to(tl.int64)  # not a number has no rank
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, REST)
    is_row, is_rest = (rows < num_rows)[:, None], rest < size
    gates = weight + (expert * 2 * num_rows + rows)[:, None] * size
    ups = gates + num_rows.to(tl.int64) * size
    gate_head = tl.load(gates + head[None, :], mask=is_row, other=0.0)
    up_head = tl.load(ups + head[None, :], mask=is_row, other=0.0)
    gate_rest = tl.load(gates + rest[None, :], mask=is_row & is_rest[None, :], other=0.0)
    up_rest = tl.load(ups + rest[None, :], mask=is_row & is_rest[None, :], other=0.0)
    left = tl.load(x + head).to(tl.float32)[None, :]
    right = tl.load(x + rest, mask=is_rest, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(gate_head.to(tl.float32) * left, axis=1) + tl.sum(gate_rest.to(tl.float32) * right, axis=1)
    up = tl.sum(up_head.to(tl.float32) * left, axis=1) + tl.sum(up_rest.to(tl.float32) * right, axis=1)
    made = (gate / (1 + tl.exp(-gate)) * up).to(middle.dtype.element_ty)
    tl.store(middle + tl.program_id(1) * num_rows + rows, made, mask=rows < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _second_of_token(  # type: ignore[no-untyped-def]
    middle, logits, weight, out, num_rows, size,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, IS_NORMALIZED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of the down projections of all chosen experts, loaded before the first product is there, and their sum."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    ranks, shares = _rank(logits, 0, EXPERTS, PAD, ACTIVE, 1, IS_NORMALIZED)
    places = tl.arange(0, PLACES)
    is_here = ranks[:, None] == places[None, :]
    experts = tl.minimum(tl.sum(tl.where(is_here, tl.arange(0, PAD)[:, None], 0), axis=0), EXPERTS - 1).to(tl.int64)
    shares = tl.sum(tl.where(is_here, shares[:, None], 0.0), axis=0)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, REST)
    is_place, is_rest = places < ACTIVE, rest < size
    is_row = is_place[:, None, None] & (rows < num_rows)[None, :, None]
    starts = weight + ((experts * num_rows)[:, None] + rows[None, :])[:, :, None] * size
    head_tile = tl.load(starts + head[None, None, :], mask=is_row, other=0.0)
    rest_tile = tl.load(starts + rest[None, None, :], mask=is_row & is_rest[None, None, :], other=0.0)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    made = middle + places[:, None] * size
    left = tl.load(made + head[None, :], mask=is_place[:, None], other=0.0).to(tl.float32)
    right = tl.load(made + rest[None, :], mask=is_place[:, None] & is_rest[None, :], other=0.0).to(tl.float32)
    sums = tl.sum(head_tile.to(tl.float32) * left[:, None, :], axis=2)
    sums += tl.sum(rest_tile.to(tl.float32) * right[:, None, :], axis=2)
    total = tl.sum(tl.where(is_place[:, None], sums * shares[:, None], 0.0), axis=0)
    tl.store(out + rows, total, mask=rows < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits, members, counts, shares, num_tokens, part_stride,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, PARTS: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """A token joins the lists of its best experts. Their order is that of arrival, on which no result depends."""
    wait(IS_OVERLAPPED)
    token = tl.program_id(0)
    start = logits + token.to(tl.int64) * EXPERTS
    ranks, own = _rank(start, part_stride, EXPERTS, PAD, ACTIVE, PARTS, IS_NORMALIZED)
    experts = tl.arange(0, PAD)
    is_chosen = (ranks < ACTIVE) & (experts < EXPERTS)
    places = tl.atomic_add(counts + experts, 1, mask=is_chosen)
    pairs = token * ACTIVE + ranks
    tl.store(members + experts * num_tokens + places, pairs, mask=is_chosen)
    tl.store(shares + pairs, own, mask=is_chosen)


@triton.jit  # type: ignore[untyped-decorator]
def _experts(  # type: ignore[no-untyped-def]
    x, weight, members, counts, shares, out, num_tokens, num_rows, size,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of one expert for a block of its tokens; experts have as many blocks one behind the other as they need."""
    wait(IS_OVERLAPPED)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, depth = tl.program_id(1), tl.arange(0, DEPTH)
    experts = tl.arange(0, PAD)
    held = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
    blocks = (held + TOKENS - 1) // TOKENS
    ends = tl.cumsum(blocks, axis=0)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)  # none for a block behind the last
    is_it = experts == expert
    num_held = tl.sum(tl.where(is_it, held, 0), axis=0)
    places = (block - tl.sum(tl.where(is_it, ends - blocks, 0), axis=0)) * TOKENS + tl.arange(0, TOKENS)
    is_mine = places < num_held
    expert = tl.minimum(expert, EXPERTS - 1)
    pairs = tl.load(members + expert * num_tokens + places, mask=is_mine, other=0)
    tokens = pairs // ACTIVE
    last = tl.where(num_held > 0, size, 0)  # a program without an expert does nothing
    is_row = rows < num_rows
    height = num_rows * 2 if IS_GATED else num_rows
    base = weight + (expert.to(tl.int64) * height + tl.where(is_row, rows, 0))[:, None] * size
    read = tokens if IS_GATED else pairs  # the first product reads the token, the second what the first made of it
    inputs = x + read.to(tl.int64)[:, None] * size
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    ups = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(0, last, DEPTH):
        is_depth = (at + depth < size)[None, :]
        columns = tl.load(inputs + (at + depth)[None, :], mask=is_mine[:, None] & is_depth, other=0.0)
        tile = tl.load(base + (at + depth)[None, :], mask=is_row[:, None] & is_depth, other=0.0)
        sums = tl.dot(tile, tl.trans(columns), sums, input_precision="ieee")
        if IS_GATED:
            upper = base + num_rows.to(tl.int64) * size + (at + depth)[None, :]
            tile = tl.load(upper, mask=is_row[:, None] & is_depth, other=0.0)
            ups = tl.dot(tile, tl.trans(columns), ups, input_precision="ieee")
    is_place = is_row[:, None] & is_mine[None, :]
    if IS_GATED:
        targets = pairs.to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(out + targets, (sums / (1 + tl.exp(-sums)) * ups).to(out.dtype.element_ty), mask=is_place)
    else:
        share = tl.load(shares + pairs, mask=is_mine, other=0.0)
        targets = (pairs % ACTIVE * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(out + targets, sums * share[None, :], mask=is_place)


def norm_routed_mlp(x: Tensor, delta: Parts, norm: Norm, experts: Experts, num_processors: int) -> tuple[Tensor, Parts]:
    router = experts.router
    if len(x) == 1 and len(router) <= MAX_RANKED and can_norm(x, delta, router):
        normed, scores = torch.empty_like(x), torch.empty(1, len(router), dtype=torch.float32, device=x.device)
        total = multiply_few(x, router, scores, delta, norm, normed)
        return total, Parts(_through_experts(normed, scores, experts))
    counts = torch.zeros(len(router), dtype=torch.int32, device=x.device)
    total, normed = add_norm(x, delta, norm)
    logits = linear(normed, router, num_processors)
    return total, _through_lists(normed, logits, counts, experts)


def _through_experts(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    """One token: every program finds the experts by itself, and no weight waits for a tile of the matrix units."""
    _, gate_up, down, num_active, is_normalized = experts
    num_experts, num_rows, inner = down.shape
    options: dict[str, Any] = {"EXPERTS": num_experts, "PAD": triton.next_power_of_2(num_experts), "ACTIVE": num_active}
    middle = torch.empty(num_active, inner, dtype=x.dtype, device=x.device)
    size = x.shape[1]
    rows, warps = plan_first(size)
    launch(_first_of_token, (triton.cdiv(inner, rows), num_active), x.device,
        x, logits, gate_up, middle, inner, size, ROWS=rows, num_warps=warps, **head_and_rest(size), **options,
    )  # fmt: skip
    out = torch.empty(1, num_rows, dtype=torch.float32, device=x.device)
    places = triton.next_power_of_2(num_active)
    rows, warps = plan_second(places, inner)
    launch(_second_of_token, (triton.cdiv(num_rows, rows),), x.device,
        middle, logits, down, out, num_rows, inner, PLACES=places, ROWS=rows, IS_NORMALIZED=is_normalized,
        num_warps=warps, **head_and_rest(inner), **options,
    )  # fmt: skip
    return out


def plan_first(size: int) -> tuple[int, int]:
    """Rows of a program, and its warps."""
    return max(1, MAX_HELD // (2 * triton.next_power_of_2(size))), 4


def plan_second(num_places: int, size: int) -> tuple[int, int]:
    rows = max(1, MAX_HELD // (num_places * triton.next_power_of_2(size)))
    return rows, 4 if num_places * size * rows <= MAX_HELD else 8


def plan_lists(num_tokens: int, block: int, *, is_large: bool) -> tuple[int, int, int]:
    """Rows of the first product, and stages of both, for blocks of that many tokens. Measured on an H200."""
    if not is_large:  # one token's few experts leave processors idle, or one with twice the work of another
        return 16 if num_tokens == 1 else 32, 3, 3
    return (64, 3, 2) if block == MIN_TILE else (64, 4, 3)


def _through_lists(x: Tensor, logits: Parts, counts: Tensor, experts: Experts) -> Parts:
    """Several tokens: every expert gets a list of those that chose it, `counts` (zeros) its length. A program takes
    rows of one expert for a block of its list, so that weights are read once where lists are short. What the experts of
    a token yield are parts of the sum."""
    _, gate_up, down, num_active, is_normalized = experts
    num_tokens, size = x.shape
    num_experts, num_rows, inner = down.shape
    num_pairs = num_tokens * num_active
    members = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=x.device)
    shares = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
    options: dict[str, Any] = {"EXPERTS": num_experts, "PAD": triton.next_power_of_2(num_experts), "ACTIVE": num_active}
    launch(_route, (num_tokens,), x.device,
        logits.values, members, counts, shares, num_tokens, logits.stride, PARTS=logits.num_parts,
        IS_NORMALIZED=is_normalized, **options, num_warps=4 if num_experts <= 256 else 8,
    )  # fmt: skip
    middle = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_active, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    tokens = min(MAX_BLOCK, max(MIN_TILE, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))))
    num_used = min(num_experts, num_pairs)
    num_blocks = num_used + (num_pairs - num_used) // tokens  # as many as there can be
    options |= {"TOKENS": tokens, "DEPTH": 64 if x.dtype == torch.float32 else 128}
    is_large = has_large_memory(x.device) and x.dtype != torch.float32
    rows, stages, later_stages = plan_lists(num_tokens, tokens, is_large=is_large)
    lists = members, counts, shares
    launch(_experts, (triton.cdiv(inner, rows), num_blocks), x.device,
        x, gate_up, *lists, middle, num_tokens, inner, size, ROWS=rows, IS_GATED=True, num_stages=stages, **options
    )  # fmt: skip
    launch(_experts, (triton.cdiv(num_rows, 64), num_blocks), x.device,
        middle, down, *lists, out, num_tokens, num_rows, inner, ROWS=64, IS_GATED=False, num_stages=later_stages,
        **options,
    )  # fmt: skip
    return Parts(out, num_active) if num_active > 1 else Parts(out[0])
