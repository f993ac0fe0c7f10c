"""Attention over slots of a cache, the same bits in a plain step, a chain, a tree and a prompt.

A query at position p sees the keys of positions 0 to p. What it makes of them must not depend on who else asks, how
many programs share the work, or where a tree has put its rows. So the order is one of positions:

    chunk   64 keys, from a multiple of 64 on: highest score, mass and mixed values, from nothing
    group   four chunks, folded in order
    result  all groups, folded in order

A fold is `folding.fold`, wherever it happens: in one program that walks the chunks, or where the parts that several
programs left become one.

A key of a chain lies in the cache where its position says. Only a branching tree has its rows elsewhere: from the
anchor's chunk on, its keys are gathered for each node in the order of positions, cached rows and then its ancestors.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu import schedule
from blockpilot.gpu.device import has_large_memory, num_processors, on_device
from blockpilot.gpu.interface import AttentionLayer, Parts, PassInputs
from blockpilot.gpu.kernels.cache_rows import head_weights, rotate_store
from blockpilot.gpu.kernels.fixed_point import inverse_root, power_of, square_units
from blockpilot.gpu.kernels.folding import (
    CHUNK,
    GROUP_CHUNKS,
    combine_parts,
    count_seen,
    find_rows,
    finish_nodes,
    fold,
    nothing,
    read_chunk,
    store_part,
    store_result,
)
from blockpilot.gpu.kernels.launching import launch, padded, per_count, sum_parts
from blockpilot.gpu.schedule import MIN_BRANCHING, MIN_TILE, AttentionPlan, plan_attention

COMBINED = 16  # parts that are loaded at once
MAX_EARLY = 512  # programs that load early: more would only wait for each other
MAX_FINISHED = 40  # parts that the nodes of a tree fold by themselves


@per_count  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, slots, starts, masks, branches, out, partial, stats, scale, slot_stride, capacity, num_rows, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, CAN_BRANCH: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Chunks that queries share, `UNIT` of them (0: all) for a tile of queries."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    num_units = (count * GROUP + TILE - 1) // TILE * SPLITS
    request, unit, head = tl.program_id(0) // num_units, tl.program_id(0) % num_units, tl.program_id(1)
    tile, split = unit // SPLITS, unit % SPLITS
    start = tl.load(starts + request)
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    members, dims = tile * TILE + tl.arange(0, TILE), tl.arange(0, PAD)
    is_row, is_dim = members < count * GROUP, dims < DIM
    tokens = request * count + tl.where(is_row, members // GROUP, 0)
    ends = tl.minimum(start + count_seen(masks, tokens, is_row, count, WORDS), capacity)
    is_branching = False
    if CAN_BRANCH:
        is_branching = tl.load(branches + request) != 0
        ends = tl.where(is_branching, start // CHUNK * CHUNK, ends)
    end = tl.max(tl.where(is_row, ends, 0), axis=0)
    rows = tokens * HEADS + head * GROUP + members % GROUP
    places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    is_place = is_row[:, None] & is_dim[None, :]
    first, last = split * UNIT, tl.cdiv(end, CHUNK)
    if UNIT > 0:
        last = tl.minimum(last, first + UNIT)
    if UNIT == 1:
        # what earlier passes stored does not depend on the kernel before, and is loaded while that one ends
        columns = first * CHUNK + tl.arange(0, CHUNK)
        offsets = base + columns.to(tl.int64)[:, None] * DIM + dims[None, :]
        is_old = (columns < tl.minimum(start, end))[:, None] & is_dim[None, :]
        key_tile = tl.load(keys + offsets, mask=is_old, other=0.0)
        value_tile = tl.load(values + offsets, mask=is_old, other=0.0)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if first < last:
        queries = tl.load(q + places, mask=is_place, other=0.0)
        if UNIT == 1:
            if first * CHUNK + CHUNK > start:
                is_new = ((columns >= start) & (columns < end))[:, None] & is_dim[None, :]
                key_tile += tl.load(keys + offsets, mask=is_new, other=0.0)
                value_tile += tl.load(values + offsets, mask=is_new, other=0.0)
            is_seen = is_row[:, None] & (columns[None, :] < ends[:, None])
            best, mass, mixed = read_chunk(queries, key_tile, value_tile, is_seen, scale)
            store_part(partial, stats, split * num_rows, places, rows, best, mass, mixed, is_row, is_place, DIM)
        else:
            best, mass, mixed = nothing(TILE, PAD)
            own_best, own_mass, own_mixed = nothing(TILE, PAD)  # of a group
            for chunk in range(first, last):
                if UNIT == 0:  # noqa: SIM102  # a condition of the compiler
                    if chunk // GROUP_CHUNKS * GROUP_CHUNKS == chunk:
                        best, mass, mixed = fold(best, mass, mixed, own_best, own_mass, own_mixed)
                        own_best, own_mass, own_mixed = nothing(TILE, PAD)
                columns = chunk * CHUNK + tl.arange(0, CHUNK)
                offsets = base + columns.to(tl.int64)[:, None] * DIM + dims[None, :]
                is_there = (columns < end)[:, None] & is_dim[None, :]
                key_tile = tl.load(keys + offsets, mask=is_there, other=0.0)
                value_tile = tl.load(values + offsets, mask=is_there, other=0.0)
                is_seen = is_row[:, None] & (columns[None, :] < ends[:, None])
                later = read_chunk(queries, key_tile, value_tile, is_seen, scale)
                own_best, own_mass, own_mixed = fold(own_best, own_mass, own_mixed, later[0], later[1], later[2])
            if UNIT > 0:
                store_part(
                    partial, stats, split * num_rows, places, rows, own_best, own_mass, own_mixed, is_row, is_place, DIM
                )
            elif is_branching:
                if last % GROUP_CHUNKS > 0:  # nodes go on with this group
                    store_part(
                        partial, stats, num_rows, places, rows, own_best, own_mass, own_mixed, is_row, is_place, DIM
                    )
                else:
                    best, mass, mixed = fold(best, mass, mixed, own_best, own_mass, own_mixed)
                store_part(partial, stats, num_rows * 0, places, rows, best, mass, mixed, is_row, is_place, DIM)
            else:
                best, mass, mixed = fold(best, mass, mixed, own_best, own_mass, own_mixed)
                store_result(out, places, mass, mixed, is_place)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_rows(  # type: ignore[no-untyped-def]
    x, other, weights, other_weights, cosines, sines, eps, DIM: tl.constexpr, PAD: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """What `rotate_halves` makes of heads [N, PAD] whose halves lie in one row; `other` has the halves exchanged."""
    if HAS_NORM:
        power = power_of(tl.max(tl.abs(x), axis=1))
        coarse, fine = square_units(x, power[:, None], PAD)
        scale = inverse_root(tl.sum(coarse, axis=1), tl.sum(fine, axis=1), power, DIM, eps, PAD)[:, None]
        x, other = x * scale * weights[None, :], other * scale * other_weights[None, :]
    turned = other * sines[None, :]
    return x * cosines[None, :] + tl.where((tl.arange(0, PAD) < DIM // 2)[None, :], -turned, turned)


@per_count  # type: ignore[untyped-decorator]
def _rotate_attend(  # type: ignore[no-untyped-def]
    qkv, bias, positions, cos, sin, q_weight, k_weight, keys, values, slots, starts, partial, stats, eps, part_stride,
    scale, slot_stride, capacity, num_rows, count,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """`rotate_store` and `_attend` of one token a request, a chunk for each program: one kernel less to wait for.
    Everything that does not depend on the kernel before is loaded while that one ends."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    request, split, head = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    start = tl.load(starts + request)
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    columns, dims, members = split * CHUNK + tl.arange(0, CHUNK), tl.arange(0, PAD), tl.arange(0, TILE)
    is_dim, is_row = dims < DIM, members < GROUP
    half: tl.constexpr = DIM // 2
    others = tl.where(dims < half, dims + half, dims - half)
    angles = tl.load(positions + request).to(tl.int64) * half + tl.where(dims < half, dims, dims - half)
    cosines = tl.load(cos + angles, mask=is_dim, other=0.0)
    sines = tl.load(sin + angles, mask=is_dim, other=0.0)
    q_own, q_other, k_own, k_other = cosines, cosines, cosines, cosines
    if HAS_NORM:
        q_own = tl.load(q_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        q_other = tl.load(q_weight + others, mask=is_dim, other=0.0).to(tl.float32)
        k_own = tl.load(k_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        k_other = tl.load(k_weight + others, mask=is_dim, other=0.0).to(tl.float32)
    offsets = base + columns.to(tl.int64)[:, None] * DIM + dims[None, :]
    is_old = (columns < start)[:, None] & is_dim[None, :]
    key_tile = tl.load(keys + offsets, mask=is_old, other=0.0)
    value_tile = tl.load(values + offsets, mask=is_old, other=0.0)
    token = qkv + request.to(tl.int64) * (HEADS + 2 * KV) * DIM
    own_rows, new_row = (head * GROUP + members) * DIM, (HEADS + head + tl.arange(0, 1)) * DIM
    source, is_place = token + own_rows[:, None], is_row[:, None] & is_dim[None, :]
    new, is_one = token + new_row[:, None], is_dim[None, :]
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if split * CHUNK <= start:
        queries = sum_parts(source, dims[None, :], part_stride, is_place, PARTS)
        other_queries = sum_parts(source, others[None, :], part_stride, is_place, PARTS)
        key = sum_parts(new, dims[None, :], part_stride, is_one, PARTS)
        other_key = sum_parts(new, others[None, :], part_stride, is_one, PARTS)
        value = sum_parts(new, KV * DIM + dims[None, :], part_stride, is_one, PARTS)
        if HAS_BIAS:
            own_bias, new_bias = bias + own_rows[:, None], bias + new_row[:, None]
            queries += tl.load(own_bias + dims[None, :], mask=is_place, other=0.0).to(tl.float32)
            other_queries += tl.load(own_bias + others[None, :], mask=is_place, other=0.0).to(tl.float32)
            key += tl.load(new_bias + dims[None, :], mask=is_one, other=0.0).to(tl.float32)
            other_key += tl.load(new_bias + others[None, :], mask=is_one, other=0.0).to(tl.float32)
            value += tl.load(new_bias + KV * DIM + dims[None, :], mask=is_one, other=0.0).to(tl.float32)
        value = value.to(keys.dtype.element_ty)
        queries = _rotate_rows(queries, other_queries, q_own, q_other, cosines, sines, eps, DIM, PAD, HAS_NORM)
        if (split + 1) * CHUNK > start:  # the new token's own row is in this chunk
            turned = _rotate_rows(key, other_key, k_own, k_other, cosines, sines, eps, DIM, PAD, HAS_NORM)
            stored = turned.to(keys.dtype.element_ty)
            row = tl.minimum(start, capacity - 1).to(tl.int64) * DIM + base
            tl.store(keys + row + dims[None, :], stored, mask=is_one)
            tl.store(values + row + dims[None, :], value, mask=is_one)
            is_new = (columns == start)[:, None] & is_dim[None, :]
            key_tile, value_tile = tl.where(is_new, stored, key_tile), tl.where(is_new, value, value_tile)
        rows = request * HEADS + head * GROUP + members
        places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
        is_seen = is_row[:, None] & (columns <= start)[None, :]
        best, mass, mixed = read_chunk(queries.to(keys.dtype.element_ty), key_tile, value_tile, is_seen, scale)
        store_part(partial, stats, split * num_rows, places, rows, best, mass, mixed, is_row, is_place, DIM)


def rotate_attend(qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
    """Mixed values [N, H * D]; the cache gets the new rows."""
    plan = _plan(layer, inputs)
    if inputs.count == 1 and plan.unit == 1 and layer.num_heads // layer.keys.shape[1] <= plan.tile:
        return _attend_single(qkv, layer, inputs, plan)
    return attend(rotate_store(qkv, layer, inputs.positions, inputs.slots, inputs.starts), layer, inputs, plan)


def lay_out(inputs: PassInputs) -> PassInputs:
    """The inputs with what all layers of a target read of trees. Must come before `embed`, which waits for it."""
    masks, branches, count = inputs.masks, inputs.branches, inputs.count
    if masks is None or branches is None or count < MIN_BRANCHING:
        return inputs
    num_tokens, width = len(inputs.token_ids), schedule.num_tails(count) * schedule.CHUNK
    rows = torch.empty(num_tokens, width, dtype=torch.int32, device=masks.device)
    kernel: Any = find_rows[(num_tokens,)]
    with on_device(masks.device):
        kernel(masks, inputs.starts, branches, rows, count, WORDS=masks.shape[1], WIDTH=width, num_warps=4)
    return replace(inputs, tail_rows=rows)


def attend(q: Tensor, layer: AttentionLayer, inputs: PassInputs, plan: AttentionPlan | None = None) -> Tensor:
    """Mixed values [N, H * D] of queries [N, H, D] over rows that are in the cache already."""
    if inputs.tail_rows is None:
        inputs = lay_out(inputs)
    keys, slots, masks, tail_rows = layer.keys, inputs.slots, inputs.masks, inputs.tail_rows
    (num_tokens, num_heads, dim), (_, num_kv, capacity, _) = q.shape, keys.shape
    count, group = num_tokens // len(slots), num_heads // num_kv
    plan = plan or _plan(layer, inputs)
    num_rows, out = num_tokens * num_heads, torch.empty_like(q)
    splits = _num_splits(inputs, plan, capacity)
    parts = _part_buffers(out, splits if plan.unit else 0 if tail_rows is None else 2)
    shape = {"HEADS": num_heads, "DIM": dim, "PAD": padded(dim), "WORDS": 0 if masks is None else masks.shape[1]}
    given = q, keys, layer.values, slots, inputs.starts, slots if masks is None else masks
    branches = slots if inputs.branches is None else inputs.branches
    numbers = dim**-0.5, keys.stride(0), capacity, num_rows
    launch(_attend, (len(slots) * triton.cdiv(count * group, plan.tile) * splits, num_kv), q.device,
        *given, branches, out, *parts, *numbers, count, GROUP=group, TILE=plan.tile, UNIT=plan.unit, SPLITS=splits,
        CAN_BRANCH=tail_rows is not None, **shape, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    unit = plan.unit
    if unit and (tail_rows is None or splits > MAX_FINISHED):
        parts, unit = _combine(parts, out, inputs, unit, capacity), 0
    if tail_rows is not None:
        height = triton.next_power_of_2(group)
        launch(finish_nodes, (num_tokens, num_kv), q.device,
            *given, branches, tail_rows, *parts, out, *numbers, count, GROUP=group, HEIGHT=height,
            TILE=max(MIN_TILE, height), UNIT=unit, WIDTH=tail_rows.shape[1], BLOCK=max(1, unit), **shape,
            IS_EARLY=num_tokens * num_kv <= MAX_EARLY, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out.view(num_tokens, num_heads * dim)


def _attend_single(qkv: Parts, layer: AttentionLayer, inputs: PassInputs, plan: AttentionPlan) -> Tensor:
    keys, slots, num_heads = layer.keys, inputs.slots, layer.num_heads
    _, num_kv, capacity, dim = keys.shape
    out = torch.empty(len(slots), num_heads, dim, dtype=keys.dtype, device=keys.device)
    weights, eps = head_weights(layer, out)
    splits = _num_splits(inputs, plan, capacity)
    parts = _part_buffers(out, splits)
    launch(_rotate_attend, (len(slots) * splits, num_kv), keys.device,
        qkv.values, out if layer.bias is None else layer.bias, inputs.positions, *layer.rope, *weights, keys,
        layer.values, slots, inputs.starts, *parts, eps, qkv.stride, dim**-0.5, keys.stride(0), capacity,
        len(slots) * num_heads, 1, HEADS=num_heads, KV=num_kv, GROUP=num_heads // num_kv, DIM=dim, PAD=padded(dim),
        TILE=plan.tile, SPLITS=splits, PARTS=qkv.num_parts,
        HAS_NORM=layer.norms is not None, HAS_BIAS=layer.bias is not None, num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip
    _combine(parts, out, inputs, plan.unit, capacity)
    return out.view(len(slots), num_heads * dim)


def _combine(
    parts: tuple[Tensor, Tensor], out: Tensor, inputs: PassInputs, unit: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Into `out`; what rows of branching trees have comes back as two parts."""
    num_tokens, num_heads, dim = out.shape
    masks, num_rows, can_branch = inputs.masks, num_tokens * num_heads, inputs.tail_rows is not None
    closed = _part_buffers(out, 2 if can_branch else 0)
    branches = inputs.slots if inputs.branches is None else inputs.branches
    rows = 1 if num_rows <= 1024 else 4
    launch(combine_parts, (triton.cdiv(num_rows, rows),), out.device,
        *parts, inputs.starts, inputs.slots if masks is None else masks, branches, *closed, out, num_rows, capacity,
        inputs.count, ROWS=rows, HEADS=num_heads, DIM=dim, PAD=padded(dim), UNIT=unit,
        WORDS=0 if masks is None else masks.shape[1], BLOCK=max(1, COMBINED * unit // schedule.GROUP_CHUNKS),
        CAN_BRANCH=can_branch, num_warps=1 if rows == 1 else 4,
    )  # fmt: skip
    return closed


def _plan(layer: AttentionLayer, inputs: PassInputs) -> AttentionPlan:
    keys = layer.keys
    _, num_kv, capacity, dim = keys.shape
    plan = plan_attention(
        inputs.num_requests,
        num_kv,
        inputs.count * layer.num_heads // num_kv,
        padded(dim) * keys.element_size(),
        context=inputs.context,
        is_prompt=inputs.masks is None,
        can_branch=inputs.branches is not None and inputs.count >= MIN_BRANCHING,
        processors=num_processors(keys.device),
        memory=schedule.LARGE_MEMORY if has_large_memory(keys.device) else schedule.SMALL_MEMORY,
    )
    part_bytes = schedule.part_bytes(len(inputs.token_ids) * layer.num_heads, dim)
    is_large = _num_splits(inputs, plan, capacity) * part_bytes > schedule.MAX_PART_BYTES
    return replace(plan, unit=0) if is_large else plan


def _num_splits(inputs: PassInputs, plan: AttentionPlan, capacity: int) -> int:
    """Programs that share a context."""
    longest = min(inputs.context + inputs.count, capacity)
    return triton.cdiv(longest, schedule.CHUNK * plan.unit) if plan.unit else 1


def _part_buffers(out: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Where programs leave what they mixed, highest scores and masses; nothing where there is one part."""
    if not num_parts:
        return out, out
    num_rows, dim = out.shape[0] * out.shape[1], out.shape[2]
    return tuple(  # type: ignore[return-value]
        torch.empty(num_parts, num_rows, width, dtype=torch.float32, device=out.device) for width in (dim, 2)
    )
