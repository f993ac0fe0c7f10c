"""What stands between products: residual additions with norms, DFlash 2's convolutions."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.device import on_device
from blockpilot.gpu.interface import Convolution, Norm, Parts
from blockpilot.gpu.kernels.fixed_point import inverse_root, power_of, square_units
from blockpilot.gpu.kernels.launching import can_overlap, launch, sum_parts, wait


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, total_out, normed, base, corrections, offsets, eps, size, part_stride, num_groups,
    PAD: tl.constexpr, PARTS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    is_column = columns < size
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    wait(IS_OVERLAPPED)
    wide = tl.load(x + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = sum_parts(delta, row * size + columns, part_stride, is_column, PARTS)
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
                earlier = sum_parts(delta, before * size + columns, part_stride, is_inside, PARTS)
                scale = tl.load(bases + tap * size, mask=is_column, other=0.0).to(tl.float32)
                scale += tl.load(near + tap * num_groups, mask=is_column, other=0.0).to(tl.float32)
                added += scale * earlier
        wide += added
        wide = wide.to(total_out.dtype.element_ty).to(tl.float32)
        tl.store(total_out + row * size + columns, wide.to(total_out.dtype.element_ty), mask=is_column)
    power = power_of(tl.max(tl.abs(wide), axis=0))
    coarse, fine = square_units(wide, power, PAD)
    scale = inverse_root(tl.sum(coarse, axis=0), tl.sum(fine, axis=0), power, size, eps, PAD)
    tl.store(normed + row * size + columns, (wide * scale * weights).to(normed.dtype.element_ty), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _embed(ids, table, out, size, PAD: tl.constexpr, IS_OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    wait(IS_OVERLAPPED)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    source = table + tl.load(ids + row).to(tl.int64) * size
    tl.store(out + row * size + columns, tl.load(source + columns, mask=columns < size), mask=columns < size)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, base, corrections, offsets, out, size, num_groups,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
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


def add_norm(
    x: Tensor, delta: Parts | None, norm: Norm, convolution: Convolution | None = None
) -> tuple[Tensor, Tensor]:
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size
    launch(_add_norm, (num_rows,), x.device,
        x, x if delta is None else delta.values, norm.weight, total, normed,
        x if convolution is None else convolution.base, x if convolution is None else convolution.corrections,
        x if convolution is None else convolution.offsets, norm.eps, size, 0 if delta is None else delta.stride,
        1 if convolution is None else convolution.num_groups, PAD=triton.next_power_of_2(size),
        PARTS=0 if delta is None else delta.num_parts, TAPS=0 if convolution is None else convolution.num_taps,
        GROUP=1 if convolution is None else convolution.group_size, num_warps=_num_warps(size, num_rows),
    )  # fmt: skip
    return total, normed


def _num_warps(size: int, num_rows: int) -> int:
    """One program per row. Unless there are very many, a long one takes all warps that a program can have."""
    return 32 if size > 1024 and num_rows <= 512 else 8


def embed(ids: Tensor, table: Tensor) -> Tensor:
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    kernel: Any = _embed[(len(ids),)]
    with on_device(out.device):
        kernel(ids, table, out, size, PAD=triton.next_power_of_2(size), IS_OVERLAPPED=can_overlap(out.device))
    return out


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    launch(_convolve, (num_tokens, triton.cdiv(size, 1024)), x.device,
        x, convolution.base, convolution.corrections, convolution.offsets, out, size, convolution.num_groups,
        BLOCK=1024, TAPS=convolution.num_taps, GROUP=convolution.group_size,
    )  # fmt: skip
    return out
