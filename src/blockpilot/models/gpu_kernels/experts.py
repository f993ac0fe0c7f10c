"""A layer whose tokens go through few of many experts: only the weights of chosen ones are read."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.models.gpu_kernels.launching import MIN_TILE, can_overlap, launch, sum_parts, wait
from blockpilot.models.gpu_kernels.products import can_norm, head_and_rest, linear, multiply_few
from blockpilot.models.gpu_kernels.sublayers import add_norm
from blockpilot.models.kernels_reference import Parts

MAX_HELD = 16384  # numbers of a token's experts that the registers of one program hold
MAX_RANKED = 128  # experts that every program may rank by itself: the work grows with their square


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits, ids, shares, totals, used, num_tokens, num_used, part_stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, PARTS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    tokens, experts = tl.arange(0, TOKENS), tl.arange(0, PAD)
    is_token = tokens < num_tokens
    is_place = is_token[:, None] & (experts < EXPERTS)[None, :]
    places = tokens[:, None] * EXPERTS + experts[None, :]
    x = sum_parts(logits, places, part_stride, is_place, PARTS)
    x = tl.where((experts < EXPERTS)[None, :], x, float("-inf"))
    x = tl.exp(x - tl.max(x, axis=1)[:, None])
    x = x / tl.sum(x, axis=1)[:, None]
    is_used = tl.zeros([PAD], tl.int32)
    total = tl.zeros([TOKENS], tl.float32)
    for rank in tl.static_range(0, ACTIVE):
        share, expert = tl.max(x, axis=1, return_indices=True)
        expert = tl.minimum(expert, EXPERTS - 1)  # not a number has no place
        tl.store(ids + tokens * ACTIVE + rank, expert, mask=is_token)
        tl.store(shares + tokens * ACTIVE + rank, share, mask=is_token)
        total += share
        is_taken = experts[None, :] == expert[:, None]
        is_used = is_used | tl.max((is_taken & is_token[:, None]).to(tl.int32), axis=0)
        x = tl.where(is_taken, -1.0, x)
    tl.store(totals + tokens, total if IS_NORMALIZED else total * 0 + 1, mask=is_token)
    count = tl.sum(is_used, axis=0)
    tl.store(used + tl.cumsum(is_used, axis=0) - 1, experts, mask=is_used == 1)
    rest = tl.arange(0, PAD)
    tl.store(used + rest, tl.full([PAD], -1, tl.int32), mask=(rest >= count) & (rest < num_used))


@triton.jit  # type: ignore[untyped-decorator]
def _rank(logits, EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, IS_NORMALIZED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one token: for every expert how many are better, and its share. Counting takes one reduction, choosing the
    best one by one two for each. Logits are read past the processor's own cache: a kernel may do so before it waits."""
    width: tl.constexpr = min(PAD, 32)
    experts = tl.arange(0, PAD)
    mine = tl.load(logits + experts, mask=experts < EXPERTS, other=float("-inf"), cache_modifier=".cg")
    ahead = tl.zeros([PAD, width], tl.int32)
    for at in tl.static_range(0, PAD, width):
        others = at + tl.arange(0, width)
        theirs = tl.load(logits + others, mask=others < EXPERTS, other=float("-inf"), cache_modifier=".cg")
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
    ranks, _ = _rank(logits, EXPERTS, PAD, ACTIVE, False)
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
    ranks, shares = _rank(logits, EXPERTS, PAD, ACTIVE, IS_NORMALIZED)
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
def _experts(  # type: ignore[no-untyped-def]
    x, weight, ids, shares, totals, used, out, num_tokens, num_rows, size,
    TOKENS: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, IS_GATED: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(used + tl.program_id(1))
    tokens, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    rank = tl.full([TOKENS], -1, tl.int32)
    for one in tl.static_range(0, ACTIVE):
        chosen = tl.load(ids + tokens * ACTIVE + one, mask=tokens < num_tokens, other=-2)
        rank = tl.where(chosen == expert, one, rank)
    is_mine = rank >= 0
    pair = tokens * ACTIVE + tl.maximum(rank, 0)
    last = tl.where(expert >= 0, size, 0)  # a program without an expert does nothing
    is_row = rows < num_rows
    height = num_rows * 2 if IS_GATED else num_rows
    base = weight + (tl.maximum(expert, 0).to(tl.int64) * height + tl.where(is_row, rows, 0))[:, None] * size
    read = tokens if IS_GATED else pair  # the first product reads the token, the second what the first made of it
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
        places = pair.to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(out + places, (sums / (1 + tl.exp(-sums)) * ups).to(out.dtype.element_ty), mask=is_place)
    else:
        share = tl.load(shares + pair, mask=is_mine, other=0.0) / tl.load(totals + tokens, mask=is_mine, other=1.0)
        places = (tl.maximum(rank, 0) * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(out + places, sums * share[None, :], mask=is_place)


def norm_routed_mlp(
    x: Tensor, delta: Parts, norm: Tensor, eps: float, router: Tensor, gate_up: Tensor, down: Tensor, num_active: int,
    is_normalized: bool, num_processors: int,
) -> tuple[Tensor, Parts]:  # fmt: skip
    """x + delta, and what the experts that `router` chooses make of its RMSNorm."""
    if len(x) == 1 and len(router) <= MAX_RANKED and can_norm(x, delta, router):
        normed, logits = torch.empty_like(x), torch.empty(1, len(router), dtype=torch.float32, device=x.device)
        total = multiply_few(x, router, logits, delta, norm, eps, normed)
        return total, Parts(_through_experts(normed, logits, gate_up, down, num_active, is_normalized))
    total, normed = add_norm(x, delta, norm, eps)
    return total, _routed_mlp(normed, linear(normed, router, num_processors), gate_up, down, num_active, is_normalized)


def _through_experts(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, num_active: int, is_normalized: bool
) -> Tensor:
    """One token: every program finds the experts by itself, and no weight waits for a tile of the matrix units."""
    num_experts, num_rows, inner = down.shape
    overlap = can_overlap(x.device)
    options: dict[str, Any] = {"EXPERTS": num_experts, "PAD": triton.next_power_of_2(num_experts), "ACTIVE": num_active}
    options |= {"IS_OVERLAPPED": overlap, **launch(overlap)}
    middle = torch.empty(num_active, inner, dtype=x.dtype, device=x.device)
    size = x.shape[1]
    rows, warps = plan_first(size)
    first: Any = _first_of_token[(triton.cdiv(inner, rows), num_active)]
    first(x, logits, gate_up, middle, inner, size, ROWS=rows, num_warps=warps, **head_and_rest(size), **options)
    out = torch.empty(1, num_rows, dtype=torch.float32, device=x.device)
    places = triton.next_power_of_2(num_active)
    rows, warps = plan_second(places, inner)
    second: Any = _second_of_token[(triton.cdiv(num_rows, rows),)]
    second(
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


def _routed_mlp(x: Tensor, logits: Parts, gate_up: Tensor, down: Tensor, num_active: int, is_normalized: bool) -> Parts:
    """Each token through its best experts: gate_up [experts, 2 * F, H], down [experts, H, F].

    Only experts that were chosen are read. A program takes rows of one of them for all tokens at once, so no weight is
    read twice. What the experts of a token yield are parts of the sum.
    """
    num_tokens, size = x.shape
    num_experts, num_rows, inner = down.shape
    num_used = min(num_experts, num_tokens * num_active)
    ids = torch.empty(num_tokens, num_active, dtype=torch.int32, device=x.device)
    shares = torch.empty(num_tokens, num_active, dtype=torch.float32, device=x.device)
    totals = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    used = torch.empty(num_used, dtype=torch.int32, device=x.device)
    tokens = triton.next_power_of_2(num_tokens)
    overlap = can_overlap(x.device)
    options: dict[str, Any] = {"IS_OVERLAPPED": overlap, **launch(overlap)}
    route: Any = _route[(1,)]
    route(
        logits.values, ids, shares, totals, used, num_tokens, num_used, logits.stride, TOKENS=tokens,
        EXPERTS=num_experts, PAD=triton.next_power_of_2(num_experts), ACTIVE=num_active, PARTS=logits.num_parts,
        IS_NORMALIZED=is_normalized, num_warps=1 if tokens <= 2 else 4 if tokens <= 16 else 8, **options,
    )  # fmt: skip
    middle = torch.empty(num_tokens * num_active, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_active, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    options |= {"TOKENS": max(MIN_TILE, tokens), "ACTIVE": num_active, "DEPTH": 64 if x.dtype == torch.float32 else 128}
    rows = 16 if num_tokens == 1 else 32  # few experts leave processors idle, or one with twice the work of another
    first: Any = _experts[(triton.cdiv(inner, rows), num_used)]
    first(
        x, gate_up, ids, shares, totals, used, middle, num_tokens, inner, size, ROWS=rows, IS_GATED=True, num_warps=4,
        num_stages=3, **options,
    )  # fmt: skip
    second: Any = _experts[(triton.cdiv(num_rows, 64), num_used)]
    second(
        middle, down, ids, shares, totals, used, out, num_tokens, num_rows, inner, ROWS=64, IS_GATED=False, num_warps=4,
        num_stages=3, **options,
    )  # fmt: skip
    return Parts(out, num_active) if num_active > 1 else Parts(out[0])
