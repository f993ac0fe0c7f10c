"""What writes into the slots of a cache, and moves rows there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.interface import AttentionLayer, ContextLayers, Parts
from blockpilot.gpu.kernels.fixed_point import inverse_root, power_of, square_units
from blockpilot.gpu.kernels.launching import launch, padded, per_count, sum_parts, wait

MAX_SINGLE = 1024  # programs of one token and head


@triton.jit  # type: ignore[untyped-decorator]
def rotate_halves(  # type: ignore[no-untyped-def]
    left, right, cosines, sines, weight, eps, DIM: tl.constexpr, PAD: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Both halves [N, PAD / 2] of heads, normed and rotated."""
    if HAS_NORM:
        halves = tl.arange(0, PAD // 2)
        is_half = halves < DIM // 2
        power = power_of(tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1)))
        coarse, fine = square_units(left, power[:, None], PAD)
        more_coarse, more_fine = square_units(right, power[:, None], PAD)
        coarse, fine = (
            tl.sum(coarse, axis=1) + tl.sum(more_coarse, axis=1),
            tl.sum(fine, axis=1) + tl.sum(more_fine, axis=1),
        )
        scale = inverse_root(coarse, fine, power, DIM, eps, PAD)[:, None]
        left = left * scale * tl.load(weight + halves, mask=is_half, other=0.0).to(tl.float32)[None, :]
        right = right * scale * tl.load(weight + DIM // 2 + halves, mask=is_half, other=0.0).to(tl.float32)[None, :]
    return left * cosines - right * sines, right * cosines + left * sines


@triton.jit  # type: ignore[untyped-decorator]
def _load_angles(cos, sin, positions, tokens, is_token, halves, is_both, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.load(positions + tokens, mask=is_token, other=0).to(tl.int64)
    angles = places[:, None] * (DIM // 2) + halves[None, :]
    return tl.load(cos + angles, mask=is_both, other=0.0), tl.load(sin + angles, mask=is_both, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _new_rows(slots, starts, tokens, is_token, count, slot_stride, capacity, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in a layer's cache the first head of each token begins. Padding may reach beyond a slot: its rows are the
    slot's last, which no committed token has."""
    request = tokens // count
    row = tl.load(starts + request, mask=is_token, other=0).to(tl.int64) + tokens % count
    row = tl.minimum(row, capacity - 1)
    return tl.load(slots + request, mask=is_token, other=0).to(tl.int64) * slot_stride + row * DIM


@per_count  # type: ignore[untyped-decorator]
def _rotate_store(  # type: ignore[no-untyped-def]
    qkv, bias, positions, cos, sin, q_weight, k_weight, slots, starts, q_out, keys, values, eps, part_stride,
    slot_stride, capacity, num_tokens, count,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    tokens, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    halves = tl.arange(0, PAD // 2)
    is_token = tokens < num_tokens
    is_both = is_token[:, None] & (halves < half)[None, :]
    source = qkv + ((tokens.to(tl.int64) * (HEADS + 2 * KV) + head) * DIM)[:, None] + halves[None, :]
    left = sum_parts(source, 0, part_stride, is_both, PARTS)
    right = sum_parts(source, half, part_stride, is_both, PARTS)
    if HAS_BIAS:
        added = bias + head * DIM + halves
        left += tl.load(added, mask=halves < half, other=0.0).to(tl.float32)[None, :]
        right += tl.load(added + half, mask=halves < half, other=0.0).to(tl.float32)[None, :]
    if head < HEADS + KV:
        cosines, sines = _load_angles(cos, sin, positions, tokens, is_token, halves, is_both, DIM)
        weight = q_weight if head < HEADS else k_weight
        left, right = rotate_halves(left, right, cosines, sines, weight, eps, DIM, PAD, HAS_NORM)
    left, right = left.to(q_out.dtype.element_ty), right.to(q_out.dtype.element_ty)
    if head < HEADS:
        queries = q_out + ((tokens.to(tl.int64) * HEADS + head) * DIM)[:, None] + halves[None, :]
        tl.store(queries, left, mask=is_both)
        tl.store(queries + half, right, mask=is_both)
    else:
        row = _new_rows(slots, starts, tokens, is_token, count, slot_stride, capacity, DIM)
        places = (row + ((head - HEADS) % KV).to(tl.int64) * capacity * DIM)[:, None] + halves[None, :]
        cache = keys if head < HEADS + KV else values
        tl.store(cache + places, left, mask=is_both)
        tl.store(cache + places + half, right, mask=is_both)


@per_count  # type: ignore[untyped-decorator]
def _store_context(  # type: ignore[no-untyped-def]
    projected, positions, cos, sin, weights, slots, starts, rows, eps, part_stride, layer_stride, slot_stride, capacity,
    num_tokens, count,
    LAYERS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    plane, head = tl.program_id(1), tl.program_id(2)  # plane: layer, keys or values
    half: tl.constexpr = DIM // 2
    halves = tl.arange(0, PAD // 2)
    is_token = tokens < num_tokens
    is_both = is_token[:, None] & (halves < half)[None, :]
    source = ((tokens.to(tl.int64) * LAYERS * 2 + plane) * KV + head) * DIM
    source = projected + source[:, None] + halves[None, :]
    left = sum_parts(source, 0, part_stride, is_both, PARTS)
    right = sum_parts(source, half, part_stride, is_both, PARTS)
    if plane % 2 == 0:
        cosines, sines = _load_angles(cos, sin, positions, tokens, is_token, halves, is_both, DIM)
        left, right = rotate_halves(left, right, cosines, sines, weights + plane // 2 * DIM, eps, DIM, PAD, True)
    row = _new_rows(slots, starts, tokens, is_token, count, slot_stride, capacity, DIM)
    row += plane.to(tl.int64) * layer_stride + head.to(tl.int64) * capacity * DIM
    places = rows + row[:, None] + halves[None, :]
    tl.store(places, left.to(rows.dtype.element_ty), mask=is_both)
    tl.store(places + half, right.to(rows.dtype.element_ty), mask=is_both)


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


def rotate_store(qkv: Parts, layer: AttentionLayer, positions: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    keys, num_heads, num_tokens = layer.keys, layer.num_heads, len(positions)
    _, num_kv, capacity, dim = keys.shape
    q = torch.empty(num_tokens, num_heads, dim, dtype=keys.dtype, device=positions.device)
    weights, eps = head_weights(layer, q)
    tokens = plan_rows(num_tokens, num_heads + 2 * num_kv)
    launch(_rotate_store, (triton.cdiv(num_tokens, tokens), num_heads + 2 * num_kv), q.device,
        qkv.values, q if layer.bias is None else layer.bias, positions, *layer.rope, *weights, slots, starts, q, keys,
        layer.values, eps,
        qkv.stride, keys.stride(0), capacity, num_tokens, num_tokens // len(slots), HEADS=num_heads, KV=num_kv,
        DIM=dim, PAD=padded(dim), TOKENS=tokens, HAS_NORM=layer.norms is not None, HAS_BIAS=layer.bias is not None,
        PARTS=qkv.num_parts, num_warps=1,
    )  # fmt: skip
    return q


def head_weights(layer: AttentionLayer, other: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
    """Of the norms of queries and keys; where there are none, something to point to."""
    if layer.norms is None:
        return (other, other), 0.0
    queries, keys = layer.norms
    return (queries.weight, keys.weight), queries.eps


def store_context(projected: Parts, layers: ContextLayers, positions: Tensor, slots: Tensor, starts: Tensor) -> None:
    rows, num_tokens = layers.rows, len(positions)
    num_layers, _, _, num_kv, capacity, dim = rows.shape
    tokens = plan_rows(num_tokens, num_layers * 2 * num_kv)
    launch(_store_context, (triton.cdiv(num_tokens, tokens), num_layers * 2, num_kv), rows.device,
        projected.values, positions, *layers.rope, layers.norms.weight, slots, starts, rows, layers.norms.eps,
        projected.stride, rows.stride(1), rows.stride(2), capacity, num_tokens, num_tokens // len(slots),
        LAYERS=num_layers, KV=num_kv, DIM=dim, PAD=padded(dim), TOKENS=tokens, PARTS=projected.num_parts, num_warps=1,
    )  # fmt: skip


def plan_rows(num_tokens: int, num_heads: int) -> int:
    """Tokens of one program. Thousands of programs with a single head each take longer to start than to run."""
    return 4 if num_tokens * num_heads > MAX_SINGLE else 1


def move_rows(rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    num_layers, _, _, num_kv, capacity, dim = rows.shape
    launch(_move_rows, (len(slots), num_layers * 2 * num_kv), rows.device,
        rows, slots, starts, paths, counts, rows.stride(1), rows.stride(2), capacity, KV=num_kv, DIM=dim,
        PAD=padded(dim), WIDTH=paths.shape[1], num_warps=1,
    )  # fmt: skip
