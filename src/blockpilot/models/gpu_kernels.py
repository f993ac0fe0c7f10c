"""A pass on a GPU in few kernels (Triton). float32 products use IEEE arithmetic, not TF32.

    linear         few tokens times all the weights, split over the inner size; whoever reads the result adds the parts
    gated_linear   SwiGLU's silu(gate) * up with both products
    routed_mlp     the same through the experts that a router chooses, reading no other's weights
    rotate_store   per head: q/k norm, rotary, keys and values into their cache rows
    attend         queries of all requests over the filled part of their slots, split over the context, tree masks
    add_norm       residual addition and the RMSNorm behind it; of DFlash 2, the convolution before the addition too
    gate           silu(gate) * up of a product made elsewhere
    rank_tokens    the best tokens of every row of logits and their log-probabilities
    score_pairs    DFlash 2's selector: how likely a child is after each parent
    convolve       DFlash 2's convolution before a sublayer
    gumbel         the noise of sampling
    store_context  a drafter's keys and values of committed tokens into their cache rows
    move_rows      accepted cache rows to their places

What differs from step to step (slots, lengths, masks) is read from device memory, so that a pass can be captured once
as a CUDA graph and replayed for ever. On GPUs that can (Hopper and later) a kernel is launched while the one before it
still runs and waits for its results only where it needs them; `linear` meanwhile calls its weights into the cache.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from blockpilot.models.kernels_reference import Convolution, Parts

BLOCK_KEYS = 64
MIN_TILE = 16  # the smallest tile the matrix units take
MAX_TILE = 64
MAX_SPLITS = 64
CHUNK = 4096  # tokens of a row of logits that one program ranks
MAX_PARTS = 12
MAX_SKINNY = 64  # tokens up to which `linear` is used; the library's product is better beyond
NEVER = tl.constexpr(-1.0e30)


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit  # type: ignore[untyped-decorator]
def _wait(IS_OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be launched, then wait for the results of the one before."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(parts, offsets, stride, mask, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    x, weight, out, num_tokens, num_rows, size, chunk,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, HAS_EVEN_ROWS: tl.constexpr,
    HAS_EVEN_DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    is_token = tokens < num_tokens
    is_row = rows < num_rows
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    first = split * chunk
    last = tl.minimum(first + chunk, size)
    if IS_OVERLAPPED:
        if AHEAD > 0:
            lines = tl.minimum(first + tl.arange(0, AHEAD) * 64, size - 1)
            places = (weight + safe_rows[:, None] * size + lines[None, :]).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    weights = weight + safe_rows[:, None] * size + depth[None, :]
    uppers = weights + num_rows.to(tl.int64) * size
    inputs = x + tokens.to(tl.int64)[:, None] * size + depth[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    ups = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(first, last, DEPTH):
        if HAS_EVEN_DEPTH:
            if HAS_EVEN_ROWS:  # noqa: SIM108  # a condition of the compiler
                tile = tl.load(weights + at)
            else:
                tile = tl.load(weights + at, mask=is_row[:, None], other=0.0)
            columns = tl.load(inputs + at, mask=is_token[:, None], other=0.0)
        else:
            is_depth = (at + depth < last)[None, :]
            tile = tl.load(weights + at, mask=is_row[:, None] & is_depth, other=0.0)
            columns = tl.load(inputs + at, mask=is_token[:, None] & is_depth, other=0.0)
        sums = tl.dot(tile, tl.trans(columns), sums, input_precision="ieee")
        if IS_GATED:
            if HAS_EVEN_DEPTH:
                tile = tl.load(uppers + at, mask=is_row[:, None], other=0.0)
            else:
                tile = tl.load(uppers + at, mask=is_row[:, None] & (at + depth < last)[None, :], other=0.0)
            ups = tl.dot(tile, tl.trans(columns), ups, input_precision="ieee")
    if IS_GATED:
        sums = sums / (1 + tl.exp(-sums)) * ups
    places = (split * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits, ids, shares, totals, used, num_tokens, num_used, part_stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ACTIVE: tl.constexpr, PARTS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    tokens, experts = tl.arange(0, TOKENS), tl.arange(0, PAD)
    is_token = tokens < num_tokens
    is_place = is_token[:, None] & (experts < EXPERTS)[None, :]
    places = tokens[:, None] * EXPERTS + experts[None, :]
    x = _sum_parts(logits, places, part_stride, is_place, PARTS)
    x = tl.where((experts < EXPERTS)[None, :], x, float("-inf"))
    x = tl.exp(x - tl.max(x, axis=1)[:, None])
    x = x / tl.sum(x, axis=1)[:, None]
    is_used = tl.zeros([PAD], tl.int32)
    total = tl.zeros([TOKENS], tl.float32)
    for rank in tl.static_range(0, ACTIVE):
        share, expert = tl.max(x, axis=1, return_indices=True)
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
def _experts(  # type: ignore[no-untyped-def]
    x, weight, ids, shares, totals, used, out, num_tokens, num_rows, size,
    TOKENS: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, IS_GATED: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
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


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_store(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_weight, k_weight, slots, starts, q_out, keys, values, eps, part_stride, slot_stride,
    capacity,
    COUNT: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    token, head = tl.program_id(0), tl.program_id(1)
    request = token // COUNT
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    half: tl.constexpr = DIM // 2
    base = (token.to(tl.int64) * (HEADS + 2 * KV) + head) * DIM
    x = _sum_parts(qkv, base + dims, part_stride, is_dim, PARTS)
    if head < HEADS + KV:
        partners = tl.where(dims < half, dims + half, dims - half)
        partner = _sum_parts(qkv, base + partners, part_stride, is_dim, PARTS)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps)
            is_query = head < HEADS
            own = tl.load(q_weight + dims, mask=is_dim & is_query, other=0.0).to(tl.float32)
            own += tl.load(k_weight + dims, mask=is_dim & (head >= HEADS), other=0.0).to(tl.float32)
            other = tl.load(q_weight + partners, mask=is_dim & is_query, other=0.0).to(tl.float32)
            other += tl.load(k_weight + partners, mask=is_dim & (head >= HEADS), other=0.0).to(tl.float32)
            x = x * scale * own
            partner = partner * scale * other
        angle = tl.load(positions + token).to(tl.int64) * half + dims % half
        c = tl.load(cos + angle, mask=is_dim, other=0.0)
        s = tl.load(sin + angle, mask=is_dim, other=0.0)
        x = x * c + partner * tl.where(dims < half, -s, s)
    if head < HEADS:
        query_place = (token.to(tl.int64) * HEADS + head) * DIM
        tl.store(q_out + query_place + dims, x.to(q_out.dtype.element_ty), mask=is_dim)
    else:
        row = tl.load(starts + request).to(tl.int64) + token % COUNT
        kv_head = (head - HEADS) % KV
        kv_place = tl.load(slots + request).to(tl.int64) * slot_stride + (kv_head * capacity + row) * DIM
        is_key = head < HEADS + KV
        tl.store(keys + kv_place + dims, x.to(keys.dtype.element_ty), mask=is_dim & is_key)
        tl.store(values + kv_place + dims, x.to(values.dtype.element_ty), mask=is_dim & (head >= HEADS + KV))


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, slots, starts, masks, out, partial, stats, scale, slot_stride, capacity, num_rows,
    COUNT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    tiles = (COUNT * GROUP + TILE - 1) // TILE
    request, head, split = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    rows = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    is_row = rows < COUNT * GROUP
    tokens = request * COUNT + rows // GROUP
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    places = (tokens.to(tl.int64) * HEADS + heads)[:, None] * DIM + dims[None, :]
    is_place = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + places, mask=is_place, other=0.0)
    start = tl.load(starts + request)
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    total = start + COUNT
    chunk = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK) * BLOCK
    first = split * chunk
    last = tl.minimum(first + chunk, total)

    best = tl.full([TILE], NEVER, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, PAD], tl.float32)
    for at in range(first, last, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        is_seen = is_row[:, None] & (columns < last)[None, :]
        if at + BLOCK > start:
            new = columns - start
            is_new = (new >= 0) & (columns < total)
            words = tl.load(
                masks + tokens[:, None] * WORDS + (new // 32)[None, :], mask=is_row[:, None] & is_new[None, :], other=0
            )
            is_marked = ((words >> (new % 32)[None, :]) & 1) == 1
            is_seen = is_seen & ((new < 0)[None, :] | is_marked)
        offsets = base + columns.to(tl.int64)[:, None] * DIM + dims[None, :]
        is_there = (columns < last)[:, None] & is_dim[None, :]
        key_tile = tl.load(keys + offsets, mask=is_there, other=0.0)
        value_tile = tl.load(values + offsets, mask=is_there, other=0.0)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - higher)
        weights = tl.exp(scores - higher[:, None])
        mass = mass * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        best = higher
    if SPLITS == 1:
        result = mixed / tl.maximum(mass, 1e-30)[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_place)
    else:
        shift = split * num_rows
        tl.store(partial + shift.to(tl.int64) * DIM + places, mixed, mask=is_place)
        stat = shift + tokens * HEADS + heads
        tl.store(stats + 2 * stat, best, mask=is_row)
        tl.store(stats + 2 * stat + 1, mass, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial, stats, out, num_rows,
    DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, PAD)
    is_dim = dims < DIM
    stat = (splits * num_rows + row) * 2
    best, mass = tl.load(stats + stat), tl.load(stats + stat + 1)
    weights = tl.exp(best - tl.max(best, axis=0))
    offsets = (splits.to(tl.int64) * num_rows + row)[:, None] * DIM + dims[None, :]
    parts = tl.load(partial + offsets, mask=is_dim[None, :] & (weights > 0)[:, None], other=0.0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(mass * weights, axis=0)
    tl.store(out + row.to(tl.int64) * DIM + dims, result.to(out.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, total_out, normed, base, corrections, offsets, eps, size, part_stride, num_groups,
    PAD: tl.constexpr, PARTS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    is_column = columns < size
    wide = tl.load(x + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = _sum_parts(delta, row * size + columns, part_stride, is_column, PARTS)
        if TAPS > 0:
            # corrections [N, 2 sides, taps, groups]; this is the second side
            near = corrections + (row * 2 + 1) * TAPS * num_groups + columns // GROUP
            bases = base + TAPS * size + columns
            scale = tl.load(bases, mask=is_column, other=0.0).to(tl.float32)
            scale += tl.load(near, mask=is_column, other=0.0).to(tl.float32)
            added = added * scale
            place = tl.load(offsets + row)
            for tap in tl.static_range(1, TAPS):
                before = row - tl.where(place >= tap, tap, 0)
                is_inside = is_column & (place >= tap)
                earlier = _sum_parts(delta, before * size + columns, part_stride, is_inside, PARTS)
                scale = tl.load(bases + tap * size, mask=is_column, other=0.0).to(tl.float32)
                scale += tl.load(near + tap * num_groups, mask=is_column, other=0.0).to(tl.float32)
                added += scale * earlier
        wide += added
        wide = wide.to(total_out.dtype.element_ty).to(tl.float32)
        tl.store(total_out + row * size + columns, wide.to(total_out.dtype.element_ty), mask=is_column)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + row * size + columns, (wide * scale * weights).to(normed.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, base, corrections, offsets, out, size, num_groups,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    near = corrections + row * 2 * TAPS * num_groups + columns // GROUP
    place = tl.load(offsets + row)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(0, TAPS):
        before = row - tl.where(place >= tap, tap, 0)
        earlier = tl.load(x + before * size + columns, mask=is_column & (place >= tap), other=0.0).to(tl.float32)
        scale = tl.load(base + tap * size + columns, mask=is_column, other=0.0).to(tl.float32)
        scale += tl.load(near + tap * num_groups, mask=is_column, other=0.0).to(tl.float32)
        total += scale * earlier
    tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    gate_up, out, size, part_stride, BLOCK: tl.constexpr, PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate = _sum_parts(gate_up, row * 2 * size + columns, part_stride, is_column, PARTS)
    up = _sum_parts(gate_up, row * 2 * size + size + columns, part_stride, is_column, PARTS)
    tl.store(out + row * size + columns, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _rank_chunks(  # type: ignore[no-untyped-def]
    logits, scores, ids, mass, size, row_stride, BEST: tl.constexpr, CHUNK: tl.constexpr, IS_OVERLAPPED: tl.constexpr
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    place = row * tl.num_programs(1) + chunk
    highest = tl.max(x, axis=0)
    tl.store(mass + place, highest + tl.log(tl.sum(tl.exp(x - highest), axis=0)))
    for rank in tl.static_range(0, BEST):
        value, index = tl.max(x, axis=0, return_indices=True)
        tl.store(scores + place * BEST + rank, value)
        tl.store(ids + place * BEST + rank, chunk * CHUNK + index)
        x = tl.where(columns == chunk * CHUNK + index, float("-inf"), x)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_chunks(  # type: ignore[no-untyped-def]
    scores, ids, mass, names, best, best_ids, log_probs, num_chunks,
    BEST: tl.constexpr, PAD: tl.constexpr, PAD_CHUNKS: tl.constexpr, HAS_NAMES: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    places, chunks = tl.arange(0, PAD), tl.arange(0, PAD_CHUNKS)
    num_found = num_chunks * BEST
    x = tl.load(scores + row * num_found + places, mask=places < num_found, other=float("-inf"))
    masses = tl.load(mass + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    highest = tl.max(masses, axis=0)
    total = highest + tl.log(tl.sum(tl.exp(masses - highest), axis=0))
    for rank in tl.static_range(0, BEST):
        value, index = tl.max(x, axis=0, return_indices=True)
        token = tl.load(ids + row * num_found + index).to(tl.int64)
        if HAS_NAMES:
            token = tl.load(names + token).to(tl.int64)
        tl.store(best + row * BEST + rank, value)
        tl.store(best_ids + row * BEST + rank, token)
        tl.store(log_probs + row * BEST + rank, value - total)
        x = tl.where(places == index, float("-inf"), x)


@triton.jit  # type: ignore[untyped-decorator]
def _score_pairs(  # type: ignore[no-untyped-def]
    scores, ids, anchor_ids, projected, before, behind, first, later,
    WIDTH: tl.constexpr, PAD: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    block, position = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * tl.num_programs(1) + position
    children, dims = tl.arange(0, PAD), tl.arange(0, DEPTH)
    is_child = children < WIDTH
    is_dim = dims < RANK
    child_ids = tl.load(ids + place * WIDTH + children, mask=is_child, other=0)
    if position > 0:
        parent_ids = tl.load(ids + (place - 1) * WIDTH + children, mask=is_child, other=0)
    else:
        parent_ids = tl.load(anchor_ids + block).to(tl.int64) + tl.zeros([PAD], tl.int64)
    state = tl.load(projected + place * RANK + dims, mask=is_dim, other=0.0)
    is_used = is_child[:, None] & is_dim[None, :]
    parents = tl.load(before + parent_ids[:, None] * RANK + dims[None, :], mask=is_used, other=0.0)
    wanted = tl.load(behind + child_ids[:, None] * RANK + dims[None, :], mask=is_used, other=0.0)
    pairs = tl.dot((parents * state[None, :]).to(wanted.dtype), tl.trans(wanted), input_precision="ieee")
    own = tl.load(scores + place * WIDTH + children, mask=is_child, other=0.0)
    pairs = tl.where(is_child[None, :], pairs.to(wanted.dtype).to(tl.float32) + own[None, :], float("-inf"))
    pairs -= tl.max(pairs, axis=1)[:, None]
    pairs -= tl.log(tl.sum(tl.exp(pairs), axis=1))[:, None]
    if position > 0:
        row = (block * (tl.num_programs(1) - 1) + position - 1) * WIDTH + children
        is_pair = is_child[:, None] & is_child[None, :]
        tl.store(later + row[:, None] * WIDTH + children[None, :], pairs, mask=is_pair)
    else:
        is_pair = (children == 0)[:, None] & is_child[None, :]
        tl.store(first + block * WIDTH + (children * 0)[:, None] + children[None, :], pairs, mask=is_pair)


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(keys, out, size, num_rows, BLOCK: tl.constexpr, IS_OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    _wait(IS_OVERLAPPED)
    row = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = _mix(tokens * -1640531535 + tl.load(keys + row))  # 0x9E3779B1
    bits = _mix(bits + tl.load(keys + num_rows + row))
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    noise = -tl.log(-libdevice.log1p(-uniform))
    tl.store(out + row.to(tl.int64) * size + tokens, noise, mask=tokens < size)


@triton.jit  # type: ignore[untyped-decorator]
def _store_context(  # type: ignore[no-untyped-def]
    projected, positions, cos, sin, weights, slots, starts, rows, eps, part_stride, layer_stride, slot_stride, capacity,
    COUNT: tl.constexpr, LAYERS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    token, plane, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # plane: layer, keys or values
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    half: tl.constexpr = DIM // 2
    base = ((token.to(tl.int64) * LAYERS * 2 + plane) * KV + head) * DIM
    x = _sum_parts(projected, base + dims, part_stride, is_dim, PARTS)
    if plane % 2 == 0:
        partners = tl.where(dims < half, dims + half, dims - half)
        partner = _sum_parts(projected, base + partners, part_stride, is_dim, PARTS)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps)
        own = weights + (plane // 2) * DIM
        x = x * scale * tl.load(own + dims, mask=is_dim, other=0.0).to(tl.float32)
        partner = partner * scale * tl.load(own + partners, mask=is_dim, other=0.0).to(tl.float32)
        angle = tl.load(positions + token).to(tl.int64) * half + dims % half
        c = tl.load(cos + angle, mask=is_dim, other=0.0)
        s = tl.load(sin + angle, mask=is_dim, other=0.0)
        x = x * c + partner * tl.where(dims < half, -s, s)
    request = token // COUNT
    row = tl.load(starts + request).to(tl.int64) + token % COUNT
    place = plane.to(tl.int64) * layer_stride + tl.load(slots + request).to(tl.int64) * slot_stride
    place += (head * capacity + row) * DIM
    tl.store(rows + place + dims, x.to(rows.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]
    rows, slots, starts, paths, counts, layer_stride, slot_stride, capacity,
    KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, WIDTH: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    _wait(IS_OVERLAPPED)
    request, plane = tl.program_id(0), tl.program_id(1)  # plane: layer, keys or values, head
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    start = tl.load(starts + request).to(tl.int64)
    base = (plane // KV).to(tl.int64) * layer_stride + tl.load(slots + request).to(tl.int64) * slot_stride
    base += (plane % KV).to(tl.int64) * capacity * DIM
    count = tl.load(counts + request)
    for index in range(
        1, count
    ):  # row 0, the anchor, is in its place; a path ascends, so nothing unread is overwritten
        source = tl.load(paths + request * WIDTH + index)
        if source != index:
            value = tl.load(rows + base + (start + source) * DIM + dims, mask=is_dim)
            tl.store(rows + base + (start + index) * DIM + dims, value, mask=is_dim)


@dataclass(frozen=True)
class LinearPlan:
    rows: int
    depth: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 0  # cache lines of each row that are called for before the input is there


def plan_linear(num_tokens: int, num_rows: int, size: int, num_processors: int) -> LinearPlan:
    """Tiles measured on an H200: about two programs for every processor; few rows are split over the inner size."""
    programs = -(-num_rows // 64)
    depth, stages = (128, 4) if size >= 1024 else (64, 6)
    if num_tokens > 16:
        splits = max(1, min(round(1.5 * num_processors / programs), size // (2 * depth), MAX_PARTS))
        return LinearPlan(64, depth, splits, num_stages=3, ahead=4) if splits > 1 else LinearPlan(64, 64, 1, ahead=4)
    wanted = 1 if programs > 0.7 * num_processors else round(2 * num_processors / programs)
    return LinearPlan(64, depth, max(1, min(wanted, size // (2 * depth), MAX_PARTS)), num_stages=stages, ahead=4)


def linear(
    x: Tensor, weight: Tensor, num_processors: int, plan: LinearPlan | None = None, *, out: Tensor | None = None
) -> Parts:
    """x [N, size] times weight [rows, size]; with `out` the sum is there and not in parts."""
    num_tokens, size = x.shape
    num_rows = len(weight)
    if num_tokens > MAX_SKINNY or x.dtype == torch.float32:
        return Parts(F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out))
    plan = plan or plan_linear(num_tokens, num_rows, size, num_processors)
    splits = plan.num_splits if out is None else 1
    chunk = triton.cdiv(triton.cdiv(size, splits), plan.depth) * plan.depth
    splits = triton.cdiv(size, chunk)
    if out is None:
        shape = (splits, num_tokens, num_rows) if splits > 1 else (num_tokens, num_rows)
        out = torch.empty(shape, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device)
    _multiply(x, weight, out, num_rows, plan, chunk, is_gated=False)
    return Parts(out, splits)


GATED = LinearPlan(64, 64, 1, ahead=4)  # a program takes as many rows of the gate and of the up projection


def gated_linear(x: Tensor, weight: Tensor, num_processors: int, plan: LinearPlan | None = None) -> Tensor:
    """silu(gate) * up of x [N, size] and the stacked rows [2 * rows, size] of the two projections."""
    num_tokens, size = x.shape
    if num_tokens > MAX_SKINNY or x.dtype == torch.float32:
        return gate(Parts(F.linear(x, weight)), x.dtype)
    num_rows = len(weight) // 2
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    _multiply(x, weight, out, num_rows, plan or GATED, size, is_gated=True)
    return out


def _multiply(
    x: Tensor, weight: Tensor, out: Tensor, num_rows: int, plan: LinearPlan, chunk: int, *, is_gated: bool
) -> None:  # fmt: skip
    num_tokens, size = x.shape
    tokens = max(MIN_TILE, triton.next_power_of_2(num_tokens))
    overlap = can_overlap(x.device)
    grid = (triton.cdiv(num_rows, plan.rows), triton.cdiv(num_tokens, tokens), triton.cdiv(size, chunk))
    kernel: Any = _linear[grid]
    kernel(
        x, weight, out, num_tokens, num_rows, size, chunk, TOKENS=tokens, ROWS=plan.rows, DEPTH=plan.depth,
        AHEAD=plan.ahead, HAS_EVEN_ROWS=num_rows % plan.rows == 0, HAS_EVEN_DEPTH=size % plan.depth == 0,
        IS_GATED=is_gated, IS_OVERLAPPED=overlap, num_warps=plan.num_warps, num_stages=plan.num_stages,
        **_launch(overlap),
    )  # fmt: skip


def routed_mlp(x: Tensor, logits: Parts, gate_up: Tensor, down: Tensor, num_active: int, is_normalized: bool) -> Parts:
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
    tokens = max(MIN_TILE, triton.next_power_of_2(num_tokens))
    overlap = can_overlap(x.device)
    options: dict[str, Any] = {"IS_OVERLAPPED": overlap, **_launch(overlap)}
    route: Any = _route[(1,)]
    route(
        logits.values, ids, shares, totals, used, num_tokens, num_used, logits.stride, TOKENS=tokens,
        EXPERTS=num_experts, PAD=triton.next_power_of_2(num_experts), ACTIVE=num_active, PARTS=logits.num_parts,
        IS_NORMALIZED=is_normalized, num_warps=4 if tokens <= 16 else 8, **options,
    )  # fmt: skip
    middle = torch.empty(num_tokens * num_active, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_active, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    options |= {"TOKENS": tokens, "ACTIVE": num_active, "DEPTH": 64 if x.dtype == torch.float32 else 128}
    first: Any = _experts[(triton.cdiv(inner, 32), num_used)]
    first(
        x, gate_up, ids, shares, totals, used, middle, num_tokens, inner, size, ROWS=32, IS_GATED=True, num_warps=4,
        num_stages=3, **options,
    )  # fmt: skip
    second: Any = _experts[(triton.cdiv(num_rows, 64), num_used)]
    second(
        middle, down, ids, shares, totals, used, out, num_tokens, num_rows, inner, ROWS=64, IS_GATED=False, num_warps=4,
        num_stages=3, **options,
    )  # fmt: skip
    return Parts(out, num_active) if num_active > 1 else Parts(out[0])


def rotate_store(
    qkv: Parts, positions: Tensor, table: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, num_heads: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Queries [N, H, D]; keys and values [slots, Hkv, capacity, D] get their new rows."""
    _, num_kv, capacity, dim = keys.shape
    num_tokens = len(positions)
    q = torch.empty(num_tokens, num_heads, dim, dtype=dtype, device=positions.device)
    weights = norms or (q, q)
    overlap = can_overlap(q.device)
    kernel: Any = _rotate_store[(num_tokens, num_heads + 2 * num_kv)]
    kernel(
        qkv.values, positions, table[0], table[1], weights[0], weights[1], slots, starts, q, keys, values, eps,
        qkv.stride, keys.stride(0), capacity, COUNT=num_tokens // len(slots), HEADS=num_heads, KV=num_kv, DIM=dim,
        PAD=_pad(dim), HAS_NORM=norms is not None, PARTS=qkv.num_parts, IS_OVERLAPPED=overlap,
        num_warps=1, **_launch(overlap),
    )  # fmt: skip
    return q


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    masks: Tensor,
    num_splits: int,
    context: int,
) -> Tensor:
    """Mixed values [N, H * D] of queries [N, H, D]; `masks` [N, words] marks the new rows that each token sees."""
    num_tokens, num_heads, dim = q.shape
    _, num_kv, capacity, _ = keys.shape
    count, group = num_tokens // len(slots), num_heads // num_kv
    tile = min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(count * group)))
    tiles = triton.cdiv(count * group, tile)
    num_rows = num_tokens * num_heads
    out = torch.empty_like(q)
    partial, stats = out, out
    if num_splits > 1:
        partial = torch.empty(num_splits, num_rows, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(num_splits, num_rows, 2, dtype=torch.float32, device=q.device)
    pad = _pad(dim)
    num_stages = 1 if context <= num_splits * BLOCK_KEYS else 2  # one block for each program, or a loop
    overlap = can_overlap(q.device)
    kernel: Any = _attend[(len(slots) * tiles, num_kv, num_splits)]
    kernel(
        q, keys, values, slots, starts, masks, out, partial, stats, dim**-0.5, keys.stride(0), capacity, num_rows,
        COUNT=count, HEADS=num_heads, GROUP=group, DIM=dim, PAD=pad, TILE=tile, BLOCK=BLOCK_KEYS, SPLITS=num_splits,
        WORDS=masks.shape[1], IS_OVERLAPPED=overlap, num_warps=4, num_stages=num_stages, **_launch(overlap),
    )  # fmt: skip
    if num_splits > 1:
        merge: Any = _combine[(num_rows,)]
        merge(
            partial, stats, out, num_rows, DIM=dim, PAD=pad, SPLITS=num_splits, IS_OVERLAPPED=overlap,
            num_warps=1, **_launch(overlap),
        )  # fmt: skip
    return out.view(num_tokens, num_heads * dim)


def add_norm(
    x: Tensor, delta: Parts | None, weight: Tensor, eps: float, convolution: Convolution | None = None
) -> tuple[Tensor, Tensor]:
    """x + delta (convolved, where asked), and its RMSNorm."""
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    size = x.shape[-1]
    overlap = can_overlap(x.device)
    kernel: Any = _add_norm[(x.numel() // size,)]
    kernel(
        x, x if delta is None else delta.values, weight, total, normed,
        x if convolution is None else convolution.base, x if convolution is None else convolution.corrections,
        x if convolution is None else convolution.offsets, eps, size, 0 if delta is None else delta.stride,
        1 if convolution is None else convolution.num_groups, PAD=triton.next_power_of_2(size),
        PARTS=0 if delta is None else delta.num_parts, TAPS=0 if convolution is None else convolution.num_taps,
        GROUP=1 if convolution is None else convolution.group_size, IS_OVERLAPPED=overlap,
        num_warps=8 if size > 1024 else 4, **_launch(overlap),
    )  # fmt: skip
    return total, normed


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    """The first side: what the sublayer reads."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    overlap = can_overlap(x.device)
    kernel: Any = _convolve[(num_tokens, triton.cdiv(size, 1024))]
    kernel(
        x, convolution.base, convolution.corrections, convolution.offsets, out, size, convolution.num_groups,
        BLOCK=1024, TAPS=convolution.num_taps, GROUP=convolution.group_size, IS_OVERLAPPED=overlap, **_launch(overlap),
    )  # fmt: skip
    return out


def gate(gate_up: Parts, dtype: torch.dtype) -> Tensor:
    num_tokens, width = gate_up.values.shape[-2:]
    size = width // 2
    out = torch.empty(num_tokens, size, dtype=dtype, device=gate_up.values.device)
    overlap = can_overlap(out.device)
    kernel: Any = _gate[(num_tokens, triton.cdiv(size, 512))]
    kernel(
        gate_up.values, out, size, gate_up.stride, BLOCK=512, PARTS=gate_up.num_parts, IS_OVERLAPPED=overlap,
        num_warps=2, **_launch(overlap),
    )  # fmt: skip
    return out


def store_context(
    projected: Parts, positions: Tensor, table: tuple[Tensor, Tensor], weights: Tensor, eps: float, rows: Tensor,
    slots: Tensor, starts: Tensor,
) -> None:  # fmt: skip
    """A drafter's keys and values [N, layers * 2 * Hkv * D] into its cache [layers, 2, slots, Hkv, capacity, D]."""
    num_layers, _, _, num_kv, capacity, dim = rows.shape
    num_tokens = len(positions)
    overlap = can_overlap(rows.device)
    kernel: Any = _store_context[(num_tokens, num_layers * 2, num_kv)]
    kernel(
        projected.values, positions, table[0], table[1], weights, slots, starts, rows, eps, projected.stride,
        rows.stride(1), rows.stride(2), capacity, COUNT=num_tokens // len(slots), LAYERS=num_layers, KV=num_kv, DIM=dim,
        PAD=_pad(dim), PARTS=projected.num_parts, IS_OVERLAPPED=overlap, num_warps=1, **_launch(overlap),
    )  # fmt: skip


def move_rows(rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """Gather accepted rows [layers, 2, slots, Hkv, capacity, D] behind each slot's start: paths[r, i] to place i."""
    num_layers, _, _, num_kv, capacity, dim = rows.shape
    overlap = can_overlap(rows.device)
    kernel: Any = _move_rows[(len(slots), num_layers * 2 * num_kv)]
    kernel(
        rows, slots, starts, paths, counts, rows.stride(1), rows.stride(2), capacity, KV=num_kv, DIM=dim,
        PAD=_pad(dim), WIDTH=paths.shape[1], IS_OVERLAPPED=overlap, num_warps=1, **_launch(overlap),
    )  # fmt: skip


def choose_splits(num_requests: int, num_kv_heads: int, num_tiles: int, num_processors: int, context: int) -> int:
    """Enough programs to fill the device, a power of two, and no more than a context of that length can use."""
    wanted = max(1, 2 * num_processors // max(1, num_requests * num_kv_heads * num_tiles))
    useful = triton.next_power_of_2(triton.cdiv(context, BLOCK_KEYS))
    return max(1, min(MAX_SPLITS, useful, triton.next_power_of_2(wanted)))


def rank_tokens(logits: Tensor, num_best: int, names: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and log-probabilities [N, K] of the best tokens of logits [N, V], best first; float32.

    `names` [V] are the ids of the columns, where they are not their places.
    """
    num_rows, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    scores = torch.empty(num_rows, chunks, num_best, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, chunks, num_best, dtype=torch.int32, device=logits.device)
    mass = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    overlap = can_overlap(logits.device)
    kernel: Any = _rank_chunks[(num_rows, chunks)]
    kernel(
        logits, scores, ids, mass, size, logits.stride(0), BEST=num_best, CHUNK=CHUNK, IS_OVERLAPPED=overlap,
        num_warps=8, **_launch(overlap),
    )  # fmt: skip
    best, log_probs = (torch.empty(num_rows, num_best, dtype=torch.float32, device=logits.device) for _ in range(2))
    best_ids = torch.empty(num_rows, num_best, dtype=torch.int64, device=logits.device)
    merge: Any = _merge_chunks[(num_rows,)]
    merge(
        scores, ids, mass, ids if names is None else names, best, best_ids, log_probs, chunks, BEST=num_best,
        PAD=triton.next_power_of_2(chunks * num_best), PAD_CHUNKS=triton.next_power_of_2(chunks),
        HAS_NAMES=names is not None, IS_OVERLAPPED=overlap, num_warps=4, **_launch(overlap),
    )  # fmt: skip
    return best, best_ids, log_probs


def score_pairs(
    scores: Tensor, ids: Tensor, anchor_ids: Tensor, projected: Tensor, before: Tensor, behind: Tensor
) -> tuple[Tensor, Tensor]:
    """DFlash 2's selector: log p(child | parent) after the anchor [N, K], and between positions [N, D-1, K, K].

    `scores`, `ids` [N, D, K] are the candidates, `projected` [N, D, rank] the hidden states, `before` and `behind`
    [V, rank] the codebooks of parents and children.
    """
    num_blocks, depth, width = ids.shape
    rank = before.shape[1]
    first = torch.empty(num_blocks, width, dtype=torch.float32, device=ids.device)
    later = torch.empty(num_blocks, depth - 1, width, width, dtype=torch.float32, device=ids.device)
    overlap = can_overlap(ids.device)
    kernel: Any = _score_pairs[(num_blocks, depth)]
    kernel(
        scores, ids, anchor_ids, projected, before, behind, first, later, WIDTH=width,
        PAD=max(MIN_TILE, triton.next_power_of_2(width)), RANK=rank, DEPTH=max(MIN_TILE, triton.next_power_of_2(rank)),
        IS_OVERLAPPED=overlap, num_warps=4, **_launch(overlap),
    )  # fmt: skip
    return first, later


def gumbel(keys: Tensor, size: int) -> Tensor:
    """The noise [N, size] that `decoding/sampling.py` defines, of keys [2, N] (int32)."""
    num_rows = keys.shape[1]
    out = torch.empty(num_rows, size, dtype=torch.float32, device=keys.device)
    overlap = can_overlap(keys.device)
    kernel: Any = _gumbel[(num_rows, triton.cdiv(size, 1024))]
    kernel(keys, out, size, num_rows, BLOCK=1024, IS_OVERLAPPED=overlap, num_warps=4, **_launch(overlap))
    return out


def _pad(dim: int) -> int:
    return max(MIN_TILE, triton.next_power_of_2(dim))


def _launch(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}
