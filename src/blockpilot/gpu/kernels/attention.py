"""Attention over slots of a cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.device import has_large_memory
from blockpilot.gpu.interface import AttentionLayer, Parts, PassInputs
from blockpilot.gpu.kernels.cache_rows import head_weights, rotate_halves, rotate_store
from blockpilot.gpu.kernels.launching import (
    MIN_TILE,
    launch,
    padded,
    per_count,
    sum_parts,
    wait,
)

BLOCK_KEYS = 64
MAX_TILE = 64
MAX_SPLITS = 64
SHORT = 2048  # a context that one tile of keys for each split covers
MAX_ROTATED, MIN_ROTATED_DIM = 64, 128  # `_rotate_attend` measured slower than two kernels for smaller heads
MAX_SMALL_DIM = 64
MIN_WHOLE, MAX_WHOLE = 8, 16  # requests whose queries of small heads are best kept together; more fill the device
MIN_PAIRED = 256  # rows that are combined two by two
MAX_ROW_BYTES = 256  # of keys and values that 99 KB hold twice
NEVER = tl.constexpr(-1.0e30)


@triton.jit
def _mix(scores, value_tile, best, mass, mixed):  # type: ignore[no-untyped-def]
    """One more tile of keys and values in a running softmax."""
    higher = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp(best - higher)
    weights = tl.exp(scores - higher[:, None])
    mass = mass * shrink + tl.sum(weights, axis=1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
    return higher, mass, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _is_seen(columns, last, start, total, tokens, is_row, masks, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which keys of a tile which queries see: all old ones, and the new ones that masks mark."""
    is_seen = is_row[:, None] & (columns < last)[None, :]
    if tl.max(columns, axis=0) >= start:
        new = columns - start
        is_new = (new >= 0) & (columns < total)
        words = tl.load(
            masks + tokens[:, None] * WORDS + (new // 32)[None, :], mask=is_row[:, None] & is_new[None, :], other=0
        )
        is_marked = ((words >> (new % 32)[None, :]) & 1) == 1
        is_seen = is_seen & ((new < 0)[None, :] | is_marked)
    return is_seen


@triton.jit  # type: ignore[untyped-decorator]
def _load_halves(parts, offsets, is_there, part_stride, DIM: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves [N, D/2] of heads that begin at `offsets`."""
    places = offsets[:, None] + tl.arange(0, DIM // 2)[None, :]
    left = sum_parts(parts, places, part_stride, is_there[:, None], PARTS)
    return left, sum_parts(parts, places + DIM // 2, part_stride, is_there[:, None], PARTS)


@per_count  # type: ignore[untyped-decorator]
def _rotate_attend(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_weight, k_weight, keys, values, slots, starts, masks, out, partial, stats, eps, scale,
    part_stride, slot_stride, capacity, num_rows, count,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    NEW: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, HAS_NORM: tl.constexpr,
    PARTS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    group: tl.constexpr = HEADS // KV
    half: tl.constexpr = DIM // 2
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, TILE)
    is_row = rows < count * group
    tokens = request * count + tl.where(is_row, rows // group, 0)
    heads = head * group + rows % group
    dims, halves = tl.arange(0, DIM), tl.arange(0, half)
    # what earlier passes stored does not depend on the kernel before: the first tile is loaded while that one ends
    start = tl.load(starts + request)
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    chunk = tl.maximum(tl.cdiv(tl.cdiv(start, SPLITS), BLOCK), 1) * BLOCK
    newest = tl.minimum(tl.cdiv(start, chunk), SPLITS - 1)  # this program attends to the new rows and stores them
    first = split * chunk
    last = tl.minimum(first + chunk, start)
    columns = first + tl.arange(0, BLOCK)
    is_column = columns < last
    offsets = base + tl.where(is_column, columns, 0).to(tl.int64)[:, None] * DIM
    left_keys = tl.load(keys + offsets + halves[None, :], mask=is_column[:, None], other=0.0)
    right_keys = tl.load(keys + offsets + half + halves[None, :], mask=is_column[:, None], other=0.0)
    value_tile = tl.load(values + offsets + dims[None, :], mask=is_column[:, None], other=0.0)
    angles = tl.load(positions + tokens).to(tl.int64)[:, None] * half + halves[None, :]
    cosines, sines = tl.load(cos + angles), tl.load(sin + angles)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()

    best = tl.full([TILE], NEVER, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIM], tl.float32)
    if split <= newest:
        query_places = (tokens.to(tl.int64) * (HEADS + 2 * KV) + heads) * DIM
        left, right = _load_halves(qkv, query_places, is_row, part_stride, DIM, PARTS)
        left, right = rotate_halves(left, right, cosines, sines, q_weight, eps, DIM, DIM, HAS_NORM)
        left, right = left.to(keys.dtype.element_ty), right.to(keys.dtype.element_ty)
        scores = tl.dot(left, tl.trans(left_keys), input_precision="ieee")
        scores = tl.dot(right, tl.trans(right_keys), scores, input_precision="ieee") * scale
        scores = tl.where(is_row[:, None] & is_column[None, :], scores, float("-inf"))
        best, mass, mixed = _mix(scores, value_tile, best, mass, mixed)
        for at in range(first + BLOCK, last, BLOCK):
            later = at + tl.arange(0, BLOCK)
            is_later = later < last
            more = base + later.to(tl.int64)[:, None] * DIM
            left_tile = tl.load(keys + more + halves[None, :], mask=is_later[:, None], other=0.0)
            right_tile = tl.load(keys + more + half + halves[None, :], mask=is_later[:, None], other=0.0)
            mixed_tile = tl.load(values + more + dims[None, :], mask=is_later[:, None], other=0.0)
            scores = tl.dot(left, tl.trans(left_tile), input_precision="ieee")
            scores = tl.dot(right, tl.trans(right_tile), scores, input_precision="ieee") * scale
            scores = tl.where(is_row[:, None] & is_later[None, :], scores, float("-inf"))
            best, mass, mixed = _mix(scores, mixed_tile, best, mass, mixed)
        if split == newest:
            new = tl.arange(0, NEW)
            is_new = new < count
            new_tokens = request * count + tl.where(is_new, new, 0)
            key_places = (new_tokens.to(tl.int64) * (HEADS + 2 * KV) + HEADS + head) * DIM
            new_angles = tl.load(positions + new_tokens).to(tl.int64)[:, None] * half + halves[None, :]
            new_cosines, new_sines = tl.load(cos + new_angles), tl.load(sin + new_angles)
            new_left, new_right = _load_halves(qkv, key_places, is_new, part_stride, DIM, PARTS)
            new_left, new_right = rotate_halves(
                new_left, new_right, new_cosines, new_sines, k_weight, eps, DIM, DIM, HAS_NORM
            )
            new_left, new_right = new_left.to(keys.dtype.element_ty), new_right.to(keys.dtype.element_ty)
            value_places = (key_places + KV * DIM)[:, None] + dims[None, :]
            new_values = sum_parts(qkv, value_places, part_stride, is_new[:, None], PARTS).to(values.dtype.element_ty)
            stored = base + (start + new).to(tl.int64)[:, None] * DIM
            tl.store(keys + stored + halves[None, :], new_left, mask=is_new[:, None])
            tl.store(keys + stored + half + halves[None, :], new_right, mask=is_new[:, None])
            tl.store(values + stored + dims[None, :], new_values, mask=is_new[:, None])
            is_pair = is_row[:, None] & is_new[None, :]
            words = tl.load(masks + tokens[:, None] * WORDS + (new // 32)[None, :], mask=is_pair, other=0)
            is_marked = ((words >> (new % 32)[None, :]) & 1) == 1
            new_scores = tl.dot(left, tl.trans(new_left), input_precision="ieee")
            new_scores = tl.dot(right, tl.trans(new_right), new_scores, input_precision="ieee") * scale
            new_scores = tl.where(is_pair & is_marked, new_scores, float("-inf"))
            best, mass, mixed = _mix(new_scores, new_values, best, mass, mixed)
    places = (tokens.to(tl.int64) * HEADS + heads)[:, None] * DIM + dims[None, :]
    if SPLITS == 1:
        result = mixed / tl.maximum(mass, 1e-30)[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        shift = split * num_rows
        tl.store(partial + shift.to(tl.int64) * DIM + places, mixed, mask=is_row[:, None] & (split <= newest))
        stat = shift + tokens * HEADS + heads
        tl.store(stats + 2 * stat, best, mask=is_row)
        tl.store(stats + 2 * stat + 1, mass, mask=is_row)


@per_count  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, slots, starts, masks, out, partial, stats, scale, slot_stride, capacity, num_rows, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = (count * GROUP + TILE - 1) // TILE
    request, head, split = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + request)
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    rows = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    is_row = rows < count * GROUP
    tokens = request * count + rows // GROUP
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, PAD)
    is_dim = dims < DIM
    total = start + count
    chunk = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK) * BLOCK
    first = split * chunk
    last = tl.minimum(first + chunk, total)
    columns = first + tl.arange(0, BLOCK)
    offsets = base + columns.to(tl.int64)[:, None] * DIM + dims[None, :]
    if IS_EARLY:
        # what earlier passes stored does not depend on the kernel before: the first tile is loaded while that one ends
        is_old = (columns < tl.minimum(last, start))[:, None] & is_dim[None, :]
        key_tile = tl.load(keys + offsets, mask=is_old, other=0.0)
        value_tile = tl.load(values + offsets, mask=is_old, other=0.0)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()

    best = tl.full([TILE], NEVER, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, PAD], tl.float32)
    places = (tokens.to(tl.int64) * HEADS + heads)[:, None] * DIM + dims[None, :]
    is_place = is_row[:, None] & is_dim[None, :]
    if first < last:
        queries = tl.load(q + places, mask=is_place, other=0.0)
        if IS_EARLY:
            if first + BLOCK > start:
                is_new = ((columns >= start) & (columns < last))[:, None] & is_dim[None, :]
                key_tile += tl.load(keys + offsets, mask=is_new, other=0.0)
                value_tile += tl.load(values + offsets, mask=is_new, other=0.0)
            is_seen = _is_seen(columns, last, start, total, tokens, is_row, masks, WORDS)
            scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale
            best, mass, mixed = _mix(tl.where(is_seen, scores, float("-inf")), value_tile, best, mass, mixed)
        for at in range(first + BLOCK if IS_EARLY else first, last, BLOCK):
            later = at + tl.arange(0, BLOCK)
            is_seen = _is_seen(later, last, start, total, tokens, is_row, masks, WORDS)
            more = base + later.to(tl.int64)[:, None] * DIM + dims[None, :]
            is_there = (later < last)[:, None] & is_dim[None, :]
            next_keys = tl.load(keys + more, mask=is_there, other=0.0)
            next_values = tl.load(values + more, mask=is_there, other=0.0)
            scores = tl.dot(queries, tl.trans(next_keys), input_precision="ieee") * scale
            best, mass, mixed = _mix(tl.where(is_seen, scores, float("-inf")), next_values, best, mass, mixed)
    if SPLITS == 1:
        result = mixed / tl.maximum(mass, 1e-30)[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_place)
    else:
        shift = split * num_rows
        tl.store(partial + shift.to(tl.int64) * DIM + places, mixed, mask=is_place & (first < last))
        stat = shift + tokens * HEADS + heads
        tl.store(stats + 2 * stat, best, mask=is_row)
        tl.store(stats + 2 * stat + 1, mass, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial, stats, out, num_rows,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    rows, splits, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SPLITS), tl.arange(0, PAD)
    is_dim, is_row = dims < DIM, rows < num_rows
    parts = splits.to(tl.int64)[None, :] * num_rows + rows[:, None]
    best = tl.load(stats + 2 * parts, mask=is_row[:, None], other=0.0)
    mass = tl.load(stats + 2 * parts + 1, mask=is_row[:, None], other=0.0)
    is_place = is_row[:, None, None] & is_dim[None, None, :]
    mixed = tl.load(partial + parts[:, :, None] * DIM + dims[None, None, :], mask=is_place, other=0.0)
    # a split that saw nothing has not stored anything; its part is read all the same, so that no load waits for another
    weights = tl.where(mass > 0, tl.exp(best - tl.max(best, axis=1)[:, None]), 0.0)
    mixed = tl.where((weights > 0)[:, :, None], mixed, 0.0)
    result = tl.sum(mixed * weights[:, :, None], axis=1)
    result /= tl.maximum(tl.sum(mass * weights, axis=1), 1e-30)[:, None]
    places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


def rotate_attend(qkv: Parts, layer: AttentionLayer, inputs: PassInputs, num_splits: int) -> Tensor:
    """For few tokens in one kernel, which loads old rows while the product is made."""
    keys, num_heads = layer.keys, layer.num_heads
    positions, slots, starts = inputs.positions, inputs.slots, inputs.starts
    _, num_kv, capacity, dim = keys.shape
    num_tokens, count, context, masks = len(positions), inputs.count, inputs.context, inputs.masks
    num_queries = count * num_heads // num_kv
    if not is_rotated(num_queries, dim):
        return attend(rotate_store(qkv, layer, positions, slots, starts), layer, inputs, num_splits)
    out = torch.empty(num_tokens, num_heads, dim, dtype=keys.dtype, device=positions.device)
    partial, stats = _split_buffers(out, num_splits)
    weights, eps = head_weights(layer, out)
    tile = choose_tile(len(slots), num_queries, dim, context)
    launch(_rotate_attend, (len(slots), num_kv, num_splits), out.device,
        qkv.values, positions, *layer.rope, *weights, keys, layer.values, slots, starts, masks, out,
        partial, stats, eps, dim**-0.5, qkv.stride, keys.stride(0), capacity, num_tokens * num_heads, count,
        HEADS=num_heads, KV=num_kv, DIM=dim, TILE=tile, NEW=max(MIN_TILE, triton.next_power_of_2(count)),
        BLOCK=BLOCK_KEYS, SPLITS=num_splits, WORDS=masks.shape[1], HAS_NORM=layer.norms is not None,
        PARTS=qkv.num_parts, num_warps=4, num_stages=_num_stages(keys, num_splits, context),
    )  # fmt: skip
    return _combined(out, partial, stats)


def attend(q: Tensor, layer: AttentionLayer, inputs: PassInputs, num_splits: int) -> Tensor:
    """Mixed values [N, H * D] of queries [N, H, D] over rows that are in the cache already."""
    keys, slots, masks, context = layer.keys, inputs.slots, inputs.masks, inputs.context
    num_tokens, num_heads, dim = q.shape
    _, num_kv, capacity, _ = keys.shape
    count, group = num_tokens // len(slots), num_heads // num_kv
    tile = choose_tile(len(slots), count * group, dim, context)
    tiles = triton.cdiv(count * group, tile)
    out = torch.empty_like(q)
    partial, stats = _split_buffers(out, num_splits)
    is_early = _is_early(len(slots), tile, dim, context)
    stages = _num_stages(keys, num_splits, context)
    if len(slots) == 1 and tile == MAX_TILE and dim == MIN_ROTATED_DIM and context <= SHORT and _has_large_memory():
        stages = 3
    launch(_attend, (len(slots) * tiles, num_kv, num_splits), q.device,
        q, keys, layer.values, slots, inputs.starts, masks, out, partial, stats, dim**-0.5, keys.stride(0), capacity,
        num_tokens * num_heads, count, HEADS=num_heads, GROUP=group, DIM=dim, PAD=padded(dim), TILE=tile,
        BLOCK=BLOCK_KEYS, SPLITS=num_splits, WORDS=masks.shape[1], IS_EARLY=is_early, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return _combined(out, partial, stats)


def _is_early(num_requests: int, tile: int, dim: int, context: int) -> bool:
    """Whether a program loads its first tile of keys early. In long loops, with large tiles, and where others share its
    processor, a tile of its own costs more than it saves."""
    return context <= SHORT and (dim <= MAX_SMALL_DIM or (num_requests == 1 and tile < MAX_TILE))


def _num_stages(keys: Tensor, num_splits: int, context: int) -> int:
    """One block for each program, or a loop; where memory is short, wide rows are not loaded ahead."""
    is_tight = keys.shape[-1] * keys.dtype.itemsize > MAX_ROW_BYTES and not _has_large_memory()
    return 1 if is_tight or context <= num_splits * BLOCK_KEYS else 2


def _split_buffers(out: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Where each split of the context leaves what it mixed, highest scores and masses; nothing without splits."""
    if num_splits == 1:
        return out, out
    num_rows, dim = out.shape[0] * out.shape[1], out.shape[2]
    return tuple(  # type: ignore[return-value]
        torch.empty(num_splits, num_rows, width, dtype=torch.float32, device=out.device) for width in (dim, 2)
    )


def _combined(out: Tensor, partial: Tensor, stats: Tensor) -> Tensor:
    num_tokens, num_heads, dim = out.shape
    if partial is not out:
        num_rows = num_tokens * num_heads
        rows, warps = plan_combine(num_rows, len(partial), dim)
        launch(_combine, (triton.cdiv(num_rows, rows),), out.device,
            partial, stats, out, num_rows, ROWS=rows, DIM=dim, PAD=padded(dim), SPLITS=len(partial), num_warps=warps,
        )  # fmt: skip
    return out.view(num_tokens, num_heads * dim)


def plan_combine(num_rows: int, num_splits: int, dim: int) -> tuple[int, int]:
    """Rows of one program, and its warps: a thread holds 128 numbers at most."""
    rows = 1 if num_rows < MIN_PAIRED else 2
    return rows, max(1, rows * num_splits * padded(dim) // 4096)


def is_rotated(num_queries: int, dim: int) -> bool:
    """Whether `_rotate_attend` takes a request's queries of one key head; one program holds them all."""
    return num_queries <= MAX_ROTATED and dim >= MIN_ROTATED_DIM and dim == triton.next_power_of_2(dim)


def choose_tile(num_requests: int, num_queries: int, dim: int, context: int) -> int:
    """Queries of one program. Over short contexts more programs share the work better; over long ones fewer read it."""
    most = MAX_TILE
    if context <= SHORT and not is_rotated(num_queries, dim):
        most = _short_tile(num_requests, num_queries, dim)
    return min(most, max(MIN_TILE, triton.next_power_of_2(num_queries)))


def _short_tile(num_requests: int, num_queries: int, dim: int) -> int:
    """Measured inside whole checks of an H200: heads of 64 with 1 to 64 requests of up to 192 queries; of 128 with 128
    and 256 queries."""
    if dim == MIN_ROTATED_DIM and num_queries > MAX_TILE and _has_large_memory():
        if num_requests > 1:
            return MAX_TILE
        if num_queries <= 4 * MAX_TILE:
            return MIN_TILE if num_queries <= 2 * MAX_TILE else MAX_TILE
    if dim <= MAX_SMALL_DIM and MIN_WHOLE <= num_requests <= MAX_WHOLE:
        return MAX_TILE
    return MIN_TILE if num_queries <= MAX_TILE else 2 * MIN_TILE


def _has_large_memory() -> bool:
    return torch.cuda.is_available() and has_large_memory(torch.device("cuda", torch.cuda.current_device()))


def choose_splits(
    num_requests: int, num_kv_heads: int, num_queries: int, dim: int, num_processors: int, context: int
) -> int:
    """Enough programs to fill the device, a power of two, and no more than a context of that length can use."""
    tile = choose_tile(num_requests, num_queries, dim, context)
    tiles = triton.cdiv(num_queries, tile)
    is_large = context <= SHORT and tiles > 1 and tile == MAX_TILE  # one of these a processor is enough
    wanted = max(1, (1 if is_large else 2) * num_processors // max(1, num_requests * num_kv_heads * tiles))
    useful = triton.next_power_of_2(triton.cdiv(context, BLOCK_KEYS))
    return max(1, min(MAX_SPLITS, useful, triton.next_power_of_2(wanted)))
