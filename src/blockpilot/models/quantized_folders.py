"""Hugging Face folders packed to 8 bits: done once per folder, kept in the cache folder.

A matrix becomes codes and scales as in Q8_0: one scale in half precision for 32 neighbours. Norms, routers and
embeddings that are no head as well stay as they are. The files have the form of `tensor_files.py`.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.core.config import cache_dir
from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BlockCodes
from blockpilot.models.packing import require_kernels, require_packable
from blockpilot.models.tensor_files import (
    CODES,
    INDEX_FILE,
    METADATA,
    SCALES,
    SINGLE_FILE,
    SafetensorsFolder,
    read_safetensors_folder,
    write_safetensors_folder,
)
from blockpilot.models.weights import decoder_names, is_coded, read_decoder_config

FORMATS = ("q8_0",)


def quantize_folder(folder: Path, kind: str) -> Path:
    """The folder with a model's weights in codes; made when it is first asked for and after the model has changed."""
    if kind not in FORMATS:
        raise InputError(f"unknown format {kind!r} to quantize to; known: {', '.join(FORMATS)}")
    config = read_decoder_config(folder)
    require_packable(config, str(folder))
    require_kernels()
    place = cache_dir() / "quantized" / f"{folder.resolve().name}-{kind}-{_fingerprint(folder)}"
    if not any((place / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):  # an index is written last
        table = decoder_names(config)
        coded = {source.name for name, row in table.items() if is_coded(name) for source in row}
        if not config.is_tied:
            coded -= {source.name for source in table["embed_tokens.weight"]}
        packed = _pack(read_safetensors_folder(folder), coded)
        write_safetensors_folder(place, packed, metadata=METADATA)
    return place


def _fingerprint(folder: Path) -> str:
    """Of the sizes and times of a model's files."""
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(json.dumps([str(folder.resolve()), found]).encode()).hexdigest()[:12]


def _pack(tensors: SafetensorsFolder, coded: set[str]) -> dict[str, Tensor]:
    packed: dict[str, Tensor] = {}
    for name in tensors:
        if name in coded and tensors[name].dim() == 2:
            packed |= _codes(name, tensors[name])
        else:
            packed[name] = tensors[name]
    return packed


def _codes(name: str, weight: Tensor) -> dict[str, Tensor]:
    codes = BlockCodes.quantize_q8_0(weight.float().numpy())
    return {name + CODES: torch.from_numpy(codes.codes), name + SCALES: torch.from_numpy(codes.scales).half()}
