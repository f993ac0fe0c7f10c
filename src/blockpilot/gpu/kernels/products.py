"""Tokens times weights, the same bits for every number of tokens.

A product of two rows is a sum over the inner size. The matrix units add it in the order of the inner index, whatever
the tile: what changes the bits is where the sum is cut into parts. So the cut belongs to the weight (`num_splits`),
and so does the number that is stored (`product_dtype`): parts stay float32 and are added in order by whoever reads
them, or here where tokens are many. Tiles, warps and stages are free.

float32 products use IEEE arithmetic, not TF32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blockpilot.gpu.device import has_large_memory
from blockpilot.gpu.interface import Norm, Parts
from blockpilot.gpu.kernels.fixed_point import inverse_root, power_of, square_units
from blockpilot.gpu.kernels.launching import can_overlap, launch, sum_parts
from blockpilot.gpu.kernels.sublayers import add_norm
from blockpilot.gpu.schedule import (
    LARGE_MEMORY,
    MAX_GATED_ROW,
    MIN_TILE,
    SMALL_MEMORY,
    FewPlan,
    LinearPlan,
    TiledPlan,
    adds_parts,
    holds_rows,
    num_splits,
    part_size,
    plan_linear,
    product_dtype,
)


@triton.jit  # type: ignore[untyped-decorator]
def _row_numbers(first, num_rows, ROWS: tl.constexpr, BY: tl.constexpr, IS_GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a tile, and what those of the up projection have to be moved by: `BY` rows of the gate and as many of the
    up projection by turns, so that one thread gets both sums."""
    places = tl.arange(0, ROWS)
    if IS_GATED:
        rows = first // 2 + places // (2 * BY) * BY + places % BY
        return rows, (places // BY % 2) * num_rows
    return first + places, places * 0


@triton.jit
def silu_gate(gates, ups):  # type: ignore[no-untyped-def]
    return gates / (1 + tl.exp(-gates)) * ups


@triton.jit  # type: ignore[untyped-decorator]
def _linear_few(  # type: ignore[no-untyped-def]
    x, weight, out, num_tokens, num_rows, size, chunk,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, HAS_EVEN_ROWS: tl.constexpr,
    HAS_EVEN_DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of weights are what the tile is tall of; one part of the inner size."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    rows, shift = _row_numbers(tl.program_id(0) * ROWS, num_rows, ROWS, 8, IS_GATED)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    is_token = (tokens < num_tokens)[:, None]
    is_row = (rows < num_rows)[:, None]
    safe_rows = tl.where(rows < num_rows, rows, 0).to(tl.int64) + shift
    first = split * chunk
    last = tl.minimum(first + chunk, size)
    starts = weight + safe_rows[:, None] * size
    inputs = x + tokens.to(tl.int64)[:, None] * size + depth[None, :]
    if IS_OVERLAPPED:  # weights do not depend on the kernel before: call for them while it ends
        if AHEAD > 0:
            called = (starts + tl.minimum(first + tl.arange(0, AHEAD) * 64, size - 1)[None, :]).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [called], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    weights = starts + depth[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(first, last, DEPTH):
        if HAS_EVEN_DEPTH:
            if HAS_EVEN_ROWS:  # noqa: SIM108  # a condition of the compiler
                tile = tl.load(weights + at)
            else:
                tile = tl.load(weights + at, mask=is_row, other=0.0)
            columns = tl.load(inputs + at, mask=is_token, other=0.0)
        else:
            is_inner = (at + depth < last)[None, :]
            tile = tl.load(weights + at, mask=is_row & is_inner, other=0.0)
            columns = tl.load(inputs + at, mask=is_token & is_inner, other=0.0)
        sums = tl.dot(tile, tl.trans(columns), sums, input_precision="ieee")
    if IS_GATED:
        both = tl.permute(tl.reshape(sums, [ROWS // 16, 2, 8, TOKENS]), 0, 2, 3, 1)
        gates, ups = tl.split(both)
        sums = tl.reshape(silu_gate(gates, ups), [ROWS // 2, TOKENS])
        rows = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    targets = (split * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
    is_target = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + targets, sums.to(out.dtype.element_ty), mask=is_target)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_many(  # type: ignore[no-untyped-def]
    x, weight, out, num_tokens, num_rows, size, chunk,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    HAS_EVEN_DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Tokens are what the tile is tall of. `SPLITS` parts are made one after the other and added in order."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    row_tiles = tl.cdiv(num_rows * (2 if IS_GATED else 1), ROWS)
    # programs that run together share rows of weights and tokens, so that the cache holds both
    group = tl.program_id(0) // (GROUP * token_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * token_tiles)
    row_tile, token_tile = group * GROUP + place % height, place // height
    rows, shift = _row_numbers(row_tile * ROWS, num_rows, ROWS, 1, IS_GATED)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    safe_tokens = tl.where(tokens < num_tokens, tokens, 0).to(tl.int64)
    safe_rows = tl.where(rows < num_rows, rows, 0).to(tl.int64) + shift
    inputs = x + safe_tokens[:, None] * size + depth[None, :]
    weights = weight + safe_rows[:, None] * size + depth[None, :]
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1) * chunk * SPLITS  # SPLITS is 1 where parts are programs of their own
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for split in range(SPLITS):
        sums = tl.zeros([TOKENS, ROWS], tl.float32)
        begin = first + split * chunk
        end = tl.minimum(begin + chunk, size)
        for at in range(begin, end, DEPTH):
            if HAS_EVEN_DEPTH:
                left = tl.load(inputs + at)
                right = tl.load(weights + at)
            else:
                is_inner = (at + depth < end)[None, :]
                left = tl.load(inputs + at, mask=is_inner, other=0.0)
                right = tl.load(weights + at, mask=is_inner, other=0.0)
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        total = tl.where(split == 0, sums, total + sums)
    if IS_GATED:
        gates, ups = tl.split(tl.reshape(total, [TOKENS, ROWS // 2, 2]))
        total = silu_gate(gates, ups)
        rows = row_tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    targets = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[:, None] * num_rows + rows[None, :]
    is_target = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    tl.store(out + targets, total.to(out.dtype.element_ty), mask=is_target)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_tiled(  # type: ignore[no-untyped-def]
    x, weight, out, num_tokens, num_rows, size, chunk,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The same with tiles that the copy engine brings: `x`, `weight` are descriptors. Ups have tiles of their own."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    token_tiles, row_tiles = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS)
    group = tl.program_id(0) // (GROUP * token_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * token_tiles)
    row, token = (group * GROUP + place % height) * ROWS, place // height * TOKENS
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1) * chunk * SPLITS
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    ups = tl.zeros([TOKENS, ROWS], tl.float32)
    for split in range(SPLITS):
        sums = tl.zeros([TOKENS, ROWS], tl.float32)
        begin = first + split * chunk
        for at in range(begin, tl.minimum(begin + chunk, size), DEPTH):
            left = x.load([token, at])
            sums = tl.dot(left, tl.trans(weight.load([row, at])), sums)
            if IS_GATED:
                ups = tl.dot(left, tl.trans(weight.load([num_rows + row, at])), ups)
        total = tl.where(split == 0, sums, total + sums)
    if IS_GATED:
        total = silu_gate(total, ups)
    tokens, rows = token + tl.arange(0, TOKENS), row + tl.arange(0, ROWS)
    targets = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[:, None] * num_rows + rows[None, :]
    is_target = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    tl.store(out + targets, total.to(out.dtype.element_ty), mask=is_target)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_one(  # type: ignore[no-untyped-def]
    x, delta, norm, weight, total, out, num_rows, size, chunk, part_stride, eps,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, PAD: tl.constexpr,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One token times one part of rows of a small model, `HEAD` numbers and a rest, loaded before the input is there.
    With a norm every program adds and norms by itself. A tile of the matrix units has the token again and again."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    rows, shift = _row_numbers(tl.program_id(0) * ROWS, num_rows, ROWS, 8, IS_GATED)
    begin = tl.program_id(1) * chunk
    last = tl.minimum(begin + chunk, size)
    head, rest = begin + tl.arange(0, HEAD), begin + HEAD + tl.arange(0, REST)
    is_row, is_head, is_rest = (rows < num_rows)[:, None], (head < last)[None, :], (rest < last)[None, :]
    starts = weight + (tl.where(rows < num_rows, rows, 0).to(tl.int64) + shift)[:, None] * size
    head_tile = tl.load(starts + head[None, :], mask=is_row & is_head, other=0.0)
    rest_tile = tl.load(starts + rest[None, :], mask=is_row & is_rest, other=0.0)
    if HAS_NORM:
        head_norm = tl.load(norm + head, mask=head < last, other=0.0).to(tl.float32)
        rest_norm = tl.load(norm + rest, mask=rest < last, other=0.0).to(tl.float32)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    left = tl.load(x + head, mask=head < last, other=0.0)
    right = tl.load(x + rest, mask=rest < last, other=0.0)
    if HAS_NORM:
        left, right = left.to(tl.float32), right.to(tl.float32)
        if PARTS > 0:
            left += sum_parts(delta, head, part_stride, head < last, PARTS)
            right += sum_parts(delta, rest, part_stride, rest < last, PARTS)
            left = left.to(x.dtype.element_ty).to(tl.float32)
            right = right.to(x.dtype.element_ty).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + head, left.to(total.dtype.element_ty), mask=head < last)
                tl.store(total + rest, right.to(total.dtype.element_ty), mask=rest < last)
        power = power_of(tl.maximum(tl.max(tl.abs(left), axis=0), tl.max(tl.abs(right), axis=0)))
        coarse, fine = square_units(left, power, PAD)
        more_coarse, more_fine = square_units(right, power, PAD)
        coarse = tl.sum(coarse, axis=0) + tl.sum(more_coarse, axis=0)
        fine = tl.sum(fine, axis=0) + tl.sum(more_fine, axis=0)
        scale = inverse_root(coarse, fine, power, size, eps, PAD)
        left = (left * scale * head_norm).to(head_tile.dtype)
        right = (right * scale * rest_norm).to(rest_tile.dtype)
    sums = tl.dot(head_tile, tl.trans(tl.broadcast_to(left[None, :], [TOKENS, HEAD])))
    sums = tl.dot(rest_tile, tl.trans(tl.broadcast_to(right[None, :], [TOKENS, REST])), sums)
    if IS_GATED:
        both = tl.permute(tl.reshape(sums, [ROWS // 16, 2, 8, TOKENS]), 0, 2, 3, 1)
        gates, ups = tl.split(both)
        sums = tl.reshape(silu_gate(gates, ups), [ROWS // 2, TOKENS])
        rows = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    is_first = (tl.arange(0, TOKENS) == 0)[None, :]
    targets = out + (tl.program_id(1).to(tl.int64) * num_rows + rows)[:, None] + tl.arange(0, TOKENS)[None, :] * 0
    tl.store(targets, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & is_first)


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Parts:
    """x [N, size] times weight [rows, size]; with `out` the sum is there and not in parts."""
    (num_tokens, size), num_rows = x.shape, len(weight)
    splits = 1 if out is not None else num_splits(num_rows, size)
    is_added = splits > 1 and adds_parts(num_tokens, num_rows)
    num_parts = 1 if is_added else splits
    if out is None:
        shape = (num_parts, num_tokens, num_rows) if num_parts > 1 else (num_tokens, num_rows)
        out = torch.empty(shape, dtype=product_dtype(splits, x.dtype), device=x.device)
    multiply(x, weight, out, splits=splits, is_added=is_added)
    return Parts(out, num_parts)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of x [N, size] and the stacked rows [2 * rows, size] of the two projections."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    multiply(x, weight, out, is_gated=True)
    return out


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    splits: int = 1,
    is_added: bool = False,
    is_gated: bool = False,
    plan: LinearPlan | None = None,
) -> None:
    """Into `out`, whole or in parts. Every plan gives the same bits."""
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    if plan is None and holds_rows(num_tokens, len(weight), size, x.dtype, splits):
        _multiply_one(x, weight, out, splits=splits)
        return
    plan = plan or plan_linear(
        num_tokens,
        num_rows,
        size,
        x.dtype,
        splits=splits,
        is_gated=is_gated,
        is_added=is_added,
        can_tile=can_tile(x, weight),
        memory=LARGE_MEMORY if has_large_memory(x.device) else SMALL_MEMORY,
    )
    chunk = part_size(size, splits)
    height = plan.rows // 2 if is_gated and not isinstance(plan, TiledPlan) else plan.rows
    tiles = triton.cdiv(num_rows, height), triton.cdiv(num_tokens, plan.tokens)
    options = {"TOKENS": plan.tokens, "ROWS": plan.rows, "DEPTH": plan.depth, "IS_GATED": is_gated}
    options |= {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    options |= {"enable_fp_fusion": True}  # nothing is multiplied and added here but by the dot itself
    numbers = num_tokens, num_rows, size, chunk
    is_even = size % plan.depth == 0 and chunk % plan.depth == 0
    if isinstance(plan, FewPlan):
        options |= {"HAS_EVEN_DEPTH": is_even, "HAS_EVEN_ROWS": num_rows % height == 0, "AHEAD": plan.ahead}
        launch(_linear_few, (*tiles, splits), x.device, x, weight, out, *numbers, **options)
        return
    grid, options["GROUP"] = (tiles[0] * tiles[1], 1 if is_added else splits), plan.group
    options["SPLITS"] = splits if is_added else 1
    if isinstance(plan, TiledPlan):
        left, right = (
            TensorDescriptor.from_tensor(one, [height, plan.depth])
            for one, height in ((x, plan.tokens), (weight, plan.rows))
        )
        launch(_linear_tiled, grid, x.device, left, right, out, *numbers, **options)
    else:
        launch(_linear_many, grid, x.device, x, weight, out, *numbers, HAS_EVEN_DEPTH=is_even, **options)


def can_tile(x: Tensor, weight: Tensor) -> bool:
    """Whether the copy engine can bring tiles of rows like these."""
    is_aligned = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return can_overlap(x.device) and x.dtype != torch.float32 and is_aligned


def norm_linear(x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Parts]:
    """x + delta, and the product of its RMSNorm."""
    if not can_norm(x, weight):
        total, normed = add_norm(x, delta, norm)
        return total, linear(normed, weight)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return _multiply_one(x, weight, out, delta=delta, norm=norm), Parts(out)


def norm_gated_linear(x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + delta, and the gated product of its RMSNorm."""
    if not can_norm(x, weight):
        total, normed = add_norm(x, delta, norm)
        return total, gated_linear(normed, weight)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    return _multiply_one(x, weight, out, delta=delta, norm=norm), out


def can_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether the product norms its input by itself: for one token of a small model that saves more than it costs."""
    num_rows, size = weight.shape
    return holds_rows(len(x), num_rows, size, x.dtype) and num_splits(num_rows, size) == 1


def _multiply_one(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    splits: int = 1,
    delta: Parts | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Into `out`, whole or in parts; gated where it has half the rows of the weight. With a norm, what it is of."""
    size, num_rows = x.shape[1], out.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    is_gated = num_rows < len(weight)
    chunk = part_size(size, splits)
    head = max(MIN_TILE, triton.next_power_of_2(chunk + 1) // 2)
    rows = 64 if is_gated and chunk <= MAX_GATED_ROW else 32
    launch(_linear_one, (triton.cdiv(num_rows, rows // 2 if is_gated else rows), splits), x.device,
        x, x if delta is None else delta.values, x if norm is None else norm.weight, weight, total, out, num_rows, size,
        chunk, 0 if delta is None else delta.stride, 0.0 if norm is None else norm.eps, TOKENS=MIN_TILE, ROWS=rows,
        HEAD=head, REST=max(MIN_TILE, triton.next_power_of_2(max(1, chunk - head))), PAD=triton.next_power_of_2(size),
        PARTS=0 if delta is None else delta.num_parts, HAS_NORM=norm is not None, IS_GATED=is_gated, num_warps=4,
    )  # fmt: skip
    return total
