"""Which compiled kernels this machine can run, and plain loops to compare them with."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BLOCK, BlockCodes
from blockpilot.native.library import INSTRUCTIONS, Kernels, open_kernels
from blockpilot.native.weights import PackedWeight, pack_weight

Floats = NDArray[np.float32]


def _open(name: str, num_threads: int = 1) -> Kernels | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKPILOT_CPU", name)
        try:
            return open_kernels(num_threads)
        except InputError:  # this machine does not have them
            return None


RUNNABLE = [name for name in dict.fromkeys(name for known in INSTRUCTIONS.values() for name in known) if _open(name)]


def open_named(name: str, num_threads: int = 1) -> Kernels:
    kernels = _open(name, num_threads)
    assert kernels is not None and (kernels.name, kernels.num_threads) == (name, num_threads)
    return kernels


def pack(kernels: Kernels, codes: BlockCodes) -> PackedWeight:
    return pack_weight(kernels, codes.codes, codes.scales, codes.offsets, codes.fine)


def multiply(kernels: Kernels, weight: PackedWeight, x: Floats) -> Floats:
    out = np.full((len(x), weight.info.rows), np.nan, np.float32)
    x = np.ascontiguousarray(x)
    kernels.multiply(weight.info, x.ctypes.data, out.ctypes.data, len(x))
    return out


def round_rows(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Codes [N, K] and scales [N, K / 32] of rows as kernels round them."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scales = np.abs(blocks).max(-1) * (np.float32(1) / np.float32(127))
    inverse = np.divide(np.float32(1), scales, where=scales > 0, out=np.zeros_like(scales))
    return np.rint(blocks * inverse[..., None]).astype(np.int64).reshape(x.shape), scales


def plain_product(codes: BlockCodes, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x [N, K] times a weight [rows, K] from integers, and the sum of what its terms are in size."""
    rounded, x_scales = round_rows(x)
    total, size = (np.zeros((len(x), len(codes.codes))) for _ in range(2))

    def add(term: NDArray[np.float64]) -> None:
        total[...] += term
        size[...] += np.abs(term)

    width = codes.codes.shape[1] // codes.scales.shape[1]
    for part in range(codes.scales.shape[1]):
        own, block = slice(part * width, (part + 1) * width), part * width // BLOCK
        scale = np.outer(x_scales[:, block].astype(float), codes.scales[:, part])
        add(scale * (rounded[:, own] @ codes.codes[:, own].astype(np.int64).T))
    if codes.offsets is not None:
        for block in range(codes.offsets.shape[1]):
            sums = rounded[:, block * BLOCK : (block + 1) * BLOCK].sum(1) * x_scales[:, block].astype(float)
            add(np.outer(sums, codes.offsets[:, block]))
    return total, size


def assert_close(found: Floats, codes: BlockCodes, x: Floats) -> None:
    """A few units of float32 away from the exact sum."""
    expected, size = plain_product(codes, x)
    assert (np.abs(found - expected) <= 1e-6 * size + 1e-30).all()
