"""Weights in codes of every form, and layers that have them."""

import numpy as np
import torch
from torch import Tensor, nn

from blockpilot.models.block_codes import BLOCK, BlockCodes, join_parts
from blockpilot.models.decoder import Decoder
from blockpilot.models.weights import decoder_names, is_coded

LEAST = {"nibbles": 0, "centred": -8, "bytes": -127, "offset bytes": 0, "halves": -32}  # codes of each form
MOST = {"nibbles": 15, "centred": 7, "bytes": 127, "offset bytes": 31, "halves": 31}
FORMS = tuple(LEAST)
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


def give_codes(decoder: Decoder) -> None:
    """Codes of all forms in turn to all linear layers but routers, and exactly the weights that they stand for."""
    table, place = decoder_names(decoder.config), 0
    for name, layer in decoder.named_modules():
        if not isinstance(layer, nn.Linear) or not is_coded(name):
            continue
        sources = table.get(f"{name}.weight", table["embed_tokens.weight"])
        parts = layer.weight.split([source.num_rows or len(layer.weight) for source in sources])
        codes = [make_codes(part, FORMS[(place + i // 2) % len(FORMS)]) for i, part in enumerate(parts)]
        layer.block_codes = join_parts(codes)  # type: ignore[assignment]
        with torch.no_grad():
            layer.weight.copy_(torch.cat([torch.from_numpy(one.dequantize()) for one in layer.block_codes]))  # type: ignore[union-attr]
        place += 1
