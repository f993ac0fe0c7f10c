"""A layer whose tokens go through few of many experts: only the weights of chosen ones are read.

What an expert makes of a token does not depend on who else chose it, and a token's experts are added by rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.device import has_large_memory
from blockpilot.gpu.interface import Experts, Norm, Parts
from blockpilot.gpu.kernels.fixed_point import SHARE_UNIT, share_units
from blockpilot.gpu.kernels.launching import launch, wait
from blockpilot.gpu.kernels.products import linear, silu_gate
from blockpilot.gpu.kernels.sublayers import add_norm
from blockpilot.gpu.schedule import MIN_TILE

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
    units = share_units(tl.where(ranks < ACTIVE, masses, 0.0) if IS_NORMALIZED else masses)
    return ranks, masses / (tl.sum(units, axis=0).to(tl.float32) / SHARE_UNIT)


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
    x, weight, logits, members, counts, shares, out, num_tokens, num_rows, size, part_stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, IS_NORMALIZED: tl.constexpr, IS_SINGLE: tl.constexpr,
    IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of one expert for a block of its tokens; experts have as many blocks one behind the other as they need. A
    single token has no lists: block b is its expert of rank b, which every program finds by itself."""
    wait(IS_OVERLAPPED)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, depth = tl.program_id(1), tl.arange(0, DEPTH)
    experts = tl.arange(0, PAD)
    if IS_SINGLE:
        ranks, own = _rank(logits, part_stride, EXPERTS, PAD, ACTIVE, PARTS, IS_NORMALIZED)
        is_it = ranks == block
        expert = tl.sum(tl.where(is_it, experts, 0), axis=0)
        share = tl.sum(tl.where(is_it, own, 0.0), axis=0) + tl.zeros([TOKENS], tl.float32)
        num_held = 1
        is_mine = tl.arange(0, TOKENS) < 1
        pairs = block + tl.zeros([TOKENS], tl.int32)
    else:
        held = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
        blocks = (held + TOKENS - 1) // TOKENS
        ends = tl.cumsum(blocks, axis=0)
        expert = tl.sum((ends <= block).to(tl.int32), axis=0)  # none for a block behind the last
        is_it = experts == expert
        num_held = tl.sum(tl.where(is_it, held, 0), axis=0)
        places = (block - tl.sum(tl.where(is_it, ends - blocks, 0), axis=0)) * TOKENS + tl.arange(0, TOKENS)
        is_mine = places < num_held
        pairs = tl.load(members + tl.minimum(expert, EXPERTS - 1) * num_tokens + places, mask=is_mine, other=0)
        share = tl.load(shares + pairs, mask=is_mine, other=0.0)
    expert = tl.minimum(expert, EXPERTS - 1)
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
        tl.store(out + targets, silu_gate(sums, ups).to(out.dtype.element_ty), mask=is_place)
    else:
        targets = (pairs % ACTIVE * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(out + targets, sums * share[None, :], mask=is_place)


def norm_routed_mlp(x: Tensor, delta: Parts, norm: Norm, experts: Experts) -> tuple[Tensor, Parts]:
    """x + delta, and what each token's best experts make of its RMSNorm: parts of the sum, by rank."""
    total, normed = add_norm(x, delta, norm)
    logits = linear(normed, experts.router)
    (num_tokens, size), (num_experts, num_rows, inner) = x.shape, experts.down.shape
    num_active = experts.num_active
    num_pairs = num_tokens * num_active
    is_single = num_tokens == 1 and num_experts <= MAX_RANKED
    lists = (x, x, x) if is_single else _route_tokens(logits, experts, num_tokens)
    middle = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_active, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    tokens = min(MAX_BLOCK, max(MIN_TILE, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))))
    num_used = min(num_experts, num_pairs)
    num_blocks = num_used + (num_pairs - num_used) // tokens  # as many as there can be
    options = {"TOKENS": tokens, "DEPTH": 32 if x.dtype == torch.float32 else 128, "IS_SINGLE": is_single}
    options |= _describe(experts) | {"PARTS": logits.num_parts}
    plan = plan_experts(num_tokens, tokens, is_large=has_large_memory(x.device) and x.dtype != torch.float32)
    launch(_experts, (triton.cdiv(inner, plan.first_rows), num_blocks), x.device,
        normed, experts.gate_up, logits.values, *lists, middle, num_tokens, inner, size, logits.stride,
        ROWS=plan.first_rows, IS_GATED=True, num_stages=plan.first_stages, **options,
    )  # fmt: skip
    launch(_experts, (triton.cdiv(num_rows, plan.rows), num_blocks), x.device,
        middle, experts.down, logits.values, *lists, out, num_tokens, num_rows, inner, logits.stride,
        ROWS=plan.rows, IS_GATED=False, num_stages=plan.stages, **options,
    )  # fmt: skip
    return total, Parts(out, num_active) if num_active > 1 else Parts(out[0])


def _route_tokens(logits: Parts, experts: Experts, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every expert gets a list of the tokens that chose it: members, their number, and all shares."""
    num_experts, device = len(experts.router), logits.values.device
    members = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=device)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    shares = torch.empty(num_tokens * experts.num_active, dtype=torch.float32, device=device)
    launch(_route, (num_tokens,), device,
        logits.values, members, counts, shares, num_tokens, logits.stride, PARTS=logits.num_parts,
        **_describe(experts), num_warps=4 if num_experts <= 256 else 8,
    )  # fmt: skip
    return members, counts, shares


def _describe(experts: Experts) -> dict[str, Any]:
    num_experts = len(experts.router)
    given = {"EXPERTS": num_experts, "PAD": triton.next_power_of_2(num_experts), "ACTIVE": experts.num_active}
    return given | {"IS_NORMALIZED": experts.is_normalized}


@dataclass(frozen=True)
class ExpertsPlan:
    """Rows of a program and its stages, in the first product and in the second."""

    first_rows: int
    first_stages: int
    rows: int
    stages: int


def plan_experts(num_tokens: int, block: int, *, is_large: bool) -> ExpertsPlan:
    """For blocks of that many tokens. Measured on an H200."""
    if num_tokens == 1:  # few experts leave processors idle, or one with twice the work of another
        return ExpertsPlan(16, 4 if is_large else 3, 32, 3)
    if not is_large:
        return ExpertsPlan(32, 3, 64, 3)
    return ExpertsPlan(64, 3, 64, 2) if block == MIN_TILE else ExpertsPlan(64, 4, 64, 3)
