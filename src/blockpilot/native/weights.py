"""Weights in codes, in the order in which the kernels read them."""

import contextlib
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import Kernels, WeightData, address

BLOCK, SUPER, GROUP = 32, 256, 16
PAGE, ARENA_BYTES = 2 << 20, 32 << 20
NIBBLES, CENTRED, BYTES, OFFSET_BYTES, HALVES, FINE_NIBBLES, FINE_SIXES = range(7)  # as in kernels/products.h


class FineScales(NamedTuple):
    """Scales, and offsets, as whole numbers times a step in half precision that 256 weights share."""

    scales: NDArray[np.int8]  # [rows, K / 32 or K / 16]
    offsets: NDArray[np.int8] | None  # [rows, K / 32]
    steps: NDArray[np.float32]  # [1 or 2, rows, K / 256], of scales and of offsets


@dataclass(eq=False)
class PackedWeight:
    """[rows, size], row groups of 16; `data` is what the kernels read."""

    info: WeightData
    data: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


def pack_weight(
    kernels: Kernels,
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None,
    fine: FineScales | None = None,
) -> PackedWeight:
    """Of codes [rows, K], scales [rows, K / 32 or K / 16] and offsets [rows, K / 32]. `fine` are the same numbers in
    less memory; not all codes have a form with them."""
    num_rows, size = codes.shape
    if fine is not None and (found := _choose_fine(codes, fine)) is not None:
        return _pack_fine(kernels, codes, fine, *found)
    kind, zero = _choose_kind(codes, scales, offsets)
    parts = [scales] if offsets is None else [scales, offsets]
    with np.errstate(over="ignore"):
        is_half = all(np.array_equal(part, part.astype(np.float16)) for part in parts)
    numbers = 1 if kind in (CENTRED, BYTES) else 2
    stride = (256 if kind <= CENTRED else 512) + numbers * GROUP * (2 if is_half else 4)
    info, data = _place(kernels, WeightData(num_rows, size, kind, is_half, stride))
    lifted = np.ascontiguousarray(codes + np.int8(zero) if zero else codes)
    given = [np.ascontiguousarray(part, np.float32) for part in parts]
    kernels.pack(info, lifted.ctypes.data, address(given[0]), address(given[1]) if parts[1:] else None, None, info.data)
    return PackedWeight(info, data)


def _pack_fine(kernels: Kernels, codes: NDArray[np.int8], fine: FineScales, kind: int, zero: int) -> PackedWeight:
    code_bytes = 256 if kind == FINE_NIBBLES else 384  # of 16 rows' blocks
    stride = SUPER // BLOCK * (code_bytes + 2 * GROUP) + 64
    info, data = _place(kernels, WeightData(*codes.shape, kind, True, stride))
    lifted = np.ascontiguousarray(codes + np.int8(zero) if zero else codes)
    scales, steps = np.ascontiguousarray(fine.scales), np.ascontiguousarray(fine.steps)
    offsets = None if fine.offsets is None else np.ascontiguousarray(fine.offsets)
    kernels.pack(info, lifted.ctypes.data, address(scales), address(offsets), address(steps), info.data)
    return PackedWeight(info, data)


def _place(kernels: Kernels, info: WeightData) -> tuple[WeightData, NDArray[np.uint8]]:
    data = _Arena.of(kernels).take(-(-info.rows // GROUP) * group_bytes(info))
    info.data = address(data)
    return info, data


def group_bytes(info: WeightData) -> int:
    """Of 16 rows."""
    blocks: int = info.size // (BLOCK if info.kind < FINE_NIBBLES else SUPER)
    return blocks * int(info.stride)


def _choose_fine(codes: NDArray[np.int8], fine: FineScales) -> tuple[int, int] | None:
    """The form that holds such codes, and what is added to them. None: there is none."""
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    if fine.offsets is not None:
        return (FINE_NIBBLES, 0) if low >= 0 and high < 16 else None
    return (FINE_SIXES, 32) if low >= -32 and high < 32 and fine.scales.shape[1] * GROUP == codes.shape[1] else None


def _choose_kind(
    codes: NDArray[np.int8], scales: NDArray[np.float32], offsets: NDArray[np.float32] | None
) -> tuple[int, int]:
    """The smallest form that holds the codes, and what is added to them."""
    if scales.shape[1] * BLOCK != codes.shape[1]:
        return HALVES, 0
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    if offsets is not None:
        return (NIBBLES, 0) if low >= 0 and high < 16 else (OFFSET_BYTES, 0)
    return (CENTRED, 8) if low >= -8 and high < 8 else (BYTES, 0)


class _Arena:
    """Zeros in large pages where the system has them: weights are read from end to end at every step, and looking up
    small pages takes a quarter of that time. What is taken is never given back alone."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    @classmethod
    def of(cls, kernels: Kernels) -> "_Arena":
        if kernels.arena is None:
            kernels.arena = cls()
        return kernels.arena

    def take(self, count: int) -> NDArray[np.uint8]:
        rounded = -(-count // 64) * 64
        if rounded > len(self._rest):
            self._rest = _large_pages(max(rounded, ARENA_BYTES))
        found, self._rest = self._rest[:count], self._rest[rounded:]
        return found


def _large_pages(count: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, -(-count // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start:]
