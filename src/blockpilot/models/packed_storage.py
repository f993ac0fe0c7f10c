"""Weights stored in a byte each: how drafters ship, at half the size of bfloat16.

A matrix `name` [rows, K] is kept as `name.codes` (int8 [rows, K]) and `name.scales` (bfloat16 [rows, K / 32]): weight =
code * scale, one scale per 32 neighbours of a row. Everything else (norms, convolution bases, ids) stays as it is. The
file's own metadata says so, `{"blockpilot_storage": "int8-blocks-32"}`, so that no foreign tensor is taken for codes.

These are the codes that a CPU multiplies by: rounding the loaded weights again gives the same codes, bit for bit
(`BlockCodes.quantize`). Here they are read; `recipes/pack_drafter.py` writes them.
"""

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BLOCK, BlockCodes

STORAGE = "blockpilot_storage"
INT8_BLOCKS = "int8-blocks-32"
METADATA = {STORAGE: INT8_BLOCKS}  # this key alone: several are written in any order, and files would differ
CODES, SCALES = ".codes", ".scales"


def stored_names(names: list[str], metadata: dict[str, str], where: str) -> dict[str, list[str]]:
    """What each tensor of a file is made of: itself, or codes and scales."""
    storage = metadata.get(STORAGE)
    if storage is None:
        return {name: [name] for name in names}
    if storage != INT8_BLOCKS:
        raise InputError(f"{where}: {STORAGE} {storage!r} is not known (only {INT8_BLOCKS!r})")
    plain = {name: [name] for name in names if not name.endswith((CODES, SCALES))}
    packed = [name.removesuffix(CODES) for name in names if name.endswith(CODES)]
    return plain | {name: [name + CODES, name + SCALES] for name in packed}


def unpack_tensor(codes: Tensor, scales: Tensor, *, where: str) -> Tensor:
    """The float32 weights [rows, K] that codes and scales stand for."""
    is_matrix = codes.dtype == torch.int8 and scales.dim() == 2
    if not is_matrix or codes.shape != (len(scales), scales.shape[1] * BLOCK):
        raise InputError(f"{where}: codes {list(codes.shape)} and scales {list(scales.shape)} do not belong together")
    values = scales.float().numpy()
    return torch.from_numpy(BlockCodes(codes.numpy(), values, np.zeros_like(values)).dequantize())
