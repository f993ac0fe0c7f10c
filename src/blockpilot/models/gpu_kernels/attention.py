"""Attention over slots of a cache, and everything that writes into them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.models.gpu_kernels.launching import MIN_TILE, can_overlap, launch, padded, sum_parts, wait
from blockpilot.models.kernels_reference import Parts

BLOCK_KEYS = 64
MAX_TILE = 64
MAX_SPLITS = 64
NEVER = tl.constexpr(-1.0e30)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_store(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_weight, k_weight, slots, starts, q_out, keys, values, eps, part_stride, slot_stride,
    capacity,
    COUNT: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    token, head = tl.program_id(0), tl.program_id(1)
    request = token // COUNT
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    half: tl.constexpr = DIM // 2
    base = (token.to(tl.int64) * (HEADS + 2 * KV) + head) * DIM
    x = sum_parts(qkv, base + dims, part_stride, is_dim, PARTS)
    if head < HEADS + KV:
        partners = tl.where(dims < half, dims + half, dims - half)
        partner = sum_parts(qkv, base + partners, part_stride, is_dim, PARTS)
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
    wait(IS_OVERLAPPED)
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
    wait(IS_OVERLAPPED)
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
def _store_context(  # type: ignore[no-untyped-def]
    projected, positions, cos, sin, weights, slots, starts, rows, eps, part_stride, layer_stride, slot_stride, capacity,
    COUNT: tl.constexpr, LAYERS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    token, plane, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # plane: layer, keys or values
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    half: tl.constexpr = DIM // 2
    base = ((token.to(tl.int64) * LAYERS * 2 + plane) * KV + head) * DIM
    x = sum_parts(projected, base + dims, part_stride, is_dim, PARTS)
    if plane % 2 == 0:
        partners = tl.where(dims < half, dims + half, dims - half)
        partner = sum_parts(projected, base + partners, part_stride, is_dim, PARTS)
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
    wait(IS_OVERLAPPED)
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
        PAD=padded(dim), HAS_NORM=norms is not None, PARTS=qkv.num_parts, IS_OVERLAPPED=overlap,
        num_warps=1, **launch(overlap),
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
    pad = padded(dim)
    num_stages = 1 if context <= num_splits * BLOCK_KEYS else 2  # one block for each program, or a loop
    overlap = can_overlap(q.device)
    kernel: Any = _attend[(len(slots) * tiles, num_kv, num_splits)]
    kernel(
        q, keys, values, slots, starts, masks, out, partial, stats, dim**-0.5, keys.stride(0), capacity, num_rows,
        COUNT=count, HEADS=num_heads, GROUP=group, DIM=dim, PAD=pad, TILE=tile, BLOCK=BLOCK_KEYS, SPLITS=num_splits,
        WORDS=masks.shape[1], IS_OVERLAPPED=overlap, num_warps=4, num_stages=num_stages, **launch(overlap),
    )  # fmt: skip
    if num_splits > 1:
        merge: Any = _combine[(num_rows,)]
        merge(
            partial, stats, out, num_rows, DIM=dim, PAD=pad, SPLITS=num_splits, IS_OVERLAPPED=overlap,
            num_warps=1, **launch(overlap),
        )  # fmt: skip
    return out.view(num_tokens, num_heads * dim)


def choose_splits(num_requests: int, num_kv_heads: int, num_tiles: int, num_processors: int, context: int) -> int:
    """Enough programs to fill the device, a power of two, and no more than a context of that length can use."""
    wanted = max(1, 2 * num_processors // max(1, num_requests * num_kv_heads * num_tiles))
    useful = triton.next_power_of_2(triton.cdiv(context, BLOCK_KEYS))
    return max(1, min(MAX_SPLITS, useful, triton.next_power_of_2(wanted)))


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
        PAD=padded(dim), PARTS=projected.num_parts, IS_OVERLAPPED=overlap, num_warps=1, **launch(overlap),
    )  # fmt: skip


def move_rows(rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """Gather accepted rows [layers, 2, slots, Hkv, capacity, D] behind each slot's start: paths[r, i] to place i."""
    num_layers, _, _, num_kv, capacity, dim = rows.shape
    overlap = can_overlap(rows.device)
    kernel: Any = _move_rows[(len(slots), num_layers * 2 * num_kv)]
    kernel(
        rows, slots, starts, paths, counts, rows.stride(1), rows.stride(2), capacity, KV=num_kv, DIM=dim,
        PAD=padded(dim), WIDTH=paths.shape[1], IS_OVERLAPPED=overlap, num_warps=1, **launch(overlap),
    )  # fmt: skip
