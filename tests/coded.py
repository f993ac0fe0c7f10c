"""Weights in codes of every form, and layers that have them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockpilot.models.block_codes import BLOCK, BlockCodes, join_parts
from blockpilot.models.decoder import Decoder
from blockpilot.models.weights import decoder_names, is_coded
from blockpilot.native.weights import SUPER, FineScales

LEAST = {"nibbles": 0, "centred": -8, "bytes": -127, "offset bytes": 0, "halves": -32}  # codes of each form
MOST = {"nibbles": 15, "centred": 7, "bytes": 127, "offset bytes": 31, "halves": 31}
FORMS = tuple(LEAST)
FINE = {"fine nibbles": "nibbles", "fine sixes": "halves"}  # as K-quants have them: 256 weights share steps
IN_HALVES = ("nibbles", "centred", "bytes")  # whose scales are stored in half precision


def make_codes(weight: Tensor, form: str) -> BlockCodes:
    """The codes of this form that lie nearest to a weight [rows, K]."""
    values = weight.detach().numpy()
    blocks = values.reshape(len(values), -1, 16 if form == "halves" else BLOCK)
    has_offsets = LEAST[form] == 0
    offsets = blocks.min(-1) if has_offsets else np.zeros_like(blocks[..., 0])
    scales = np.abs(blocks - offsets[..., None]).max(-1) / MOST[form]
    if form in IN_HALVES:
        offsets, scales = (x.astype(np.float16).astype(np.float32) for x in (offsets, scales))
    codes = np.rint((blocks - offsets[..., None]) / np.maximum(scales, np.float32(1e-30))[..., None])
    codes = codes.clip(LEAST[form], MOST[form]).astype(np.int8).reshape(values.shape)
    return BlockCodes(codes, scales.astype(np.float32), offsets.astype(np.float32) if has_offsets else None)


def make_fine_codes(weight: Tensor, form: str) -> BlockCodes:
    """The same with scales, and offsets, that are whole numbers of steps."""
    plain = make_codes(weight, FINE[form])
    numbers = [plain.scales] if plain.offsets is None else [plain.scales, np.minimum(plain.offsets, 0)]
    count = weight.shape[1] // SUPER
    steps = np.stack([_steps(part.reshape(len(part), count, -1)) for part in numbers])
    wholes = [
        np.rint(part / np.repeat(step, part.shape[1] // count, axis=1)).astype(np.int8)
        for part, step in zip(numbers, steps, strict=True)
    ]
    scales, *offsets = (
        whole * np.repeat(step, whole.shape[1] // count, axis=1) for whole, step in zip(wholes, steps, strict=True)
    )
    values = weight.detach().numpy().reshape(*scales.shape, -1) - (offsets[0][..., None] if offsets else 0)
    codes = np.rint(values / np.maximum(scales, np.float32(1e-30))[..., None])
    codes = codes.clip(LEAST[FINE[form]], MOST[FINE[form]]).astype(np.int8).reshape(weight.shape)
    fine = FineScales(wholes[0], wholes[1] if offsets else None, steps)
    return BlockCodes(codes, scales, offsets[0] if offsets else None, fine)


def _steps(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of numbers [rows, K / 256, blocks] of one sign: the largest is 63 of them."""
    signed = np.where(numbers.sum(-1) < 0, numbers.min(-1), numbers.max(-1)) / 63
    return np.where(signed == 0, 1, signed).astype(np.float16).astype(np.float32)


def give_codes(decoder: Decoder) -> None:
    """Codes of all forms in turn to all linear layers but routers, and exactly the weights that they stand for."""
    table, place = decoder_names(decoder.config), 0
    for name, layer in decoder.named_modules():
        if not isinstance(layer, nn.Linear) or not is_coded(name):
            continue
        sources = table.get(f"{name}.weight", table["embed_tokens.weight"])
        parts = layer.weight.split([source.num_rows or len(layer.weight) for source in sources])
        if layer.in_features % SUPER:
            codes = [make_codes(part, FORMS[(place + i // 2) % len(FORMS)]) for i, part in enumerate(parts)]
        else:
            codes = [make_fine_codes(part, tuple(FINE)[(place + i // 2) % 2]) for i, part in enumerate(parts)]
        layer.block_codes = join_parts(codes)  # type: ignore[assignment]
        with torch.no_grad():
            layer.weight.copy_(torch.cat([torch.from_numpy(one.dequantize()) for one in layer.block_codes]))  # type: ignore[union-attr]
        place += 1
