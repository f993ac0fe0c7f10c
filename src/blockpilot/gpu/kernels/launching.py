"""What all kernels share: overlapping launches, products in parts, tiles."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from blockpilot.gpu.device import on_device
from blockpilot.gpu.schedule import MIN_TILE

per_count = triton.jit(do_not_specialize=["count"])  # tokens per request: one compiled kernel serves all numbers


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit  # type: ignore[untyped-decorator]
def wait(IS_OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be launched, then wait for the results of the one before."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def sum_parts(parts, offsets, stride, mask, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


def padded(dim: int) -> int:
    return max(MIN_TILE, triton.next_power_of_2(dim))


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any, **options: Any) -> None:
    """Enqueue a kernel that waits for its inputs itself: it may start before the one before it has ended.

    Triton compiles for the current device and launches there, wherever the tensors are. Unless told otherwise it does
    not contract a product and a sum into one instruction: where it would do so in one variant of a kernel and not in
    another, their bits would differ.
    """
    settings = {"enable_fp_fusion": False} | options
    if can_overlap(device):
        settings["launch_pdl"] = True
    with on_device(device):
        kernel[grid](*given, IS_OVERLAPPED=can_overlap(device), **settings)
