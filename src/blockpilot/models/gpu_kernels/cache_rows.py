"""What writes into the slots of a cache, and moves rows there."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.models.gpu_kernels.launching import can_overlap, launch, padded, per_count, sum_parts, wait
from blockpilot.models.kernels_reference import Parts


@per_count  # type: ignore[untyped-decorator]
def _rotate_store(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_weight, k_weight, slots, starts, q_out, keys, values, eps, part_stride, slot_stride,
    capacity, count,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    token, head = tl.program_id(0), tl.program_id(1)
    request = token // count
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
        row = tl.load(starts + request).to(tl.int64) + token % count
        kv_head = (head - HEADS) % KV
        kv_place = tl.load(slots + request).to(tl.int64) * slot_stride + (kv_head * capacity + row) * DIM
        is_key = head < HEADS + KV
        tl.store(keys + kv_place + dims, x.to(keys.dtype.element_ty), mask=is_dim & is_key)
        tl.store(values + kv_place + dims, x.to(values.dtype.element_ty), mask=is_dim & (head >= HEADS + KV))


@per_count  # type: ignore[untyped-decorator]
def _store_context(  # type: ignore[no-untyped-def]
    projected, positions, cos, sin, weights, slots, starts, rows, eps, part_stride, layer_stride, slot_stride, capacity,
    count, LAYERS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
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
    request = token // count
    row = tl.load(starts + request).to(tl.int64) + token % count
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
        qkv.stride, keys.stride(0), capacity, num_tokens // len(slots), HEADS=num_heads, KV=num_kv, DIM=dim,
        PAD=padded(dim), HAS_NORM=norms is not None, PARTS=qkv.num_parts, IS_OVERLAPPED=overlap,
        num_warps=1, **launch(overlap),
    )  # fmt: skip
    return q


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
        rows.stride(1), rows.stride(2), capacity, num_tokens // len(slots), LAYERS=num_layers, KV=num_kv, DIM=dim,
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
