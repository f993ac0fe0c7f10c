"""Hugging Face folders packed to 8 bits: done once per folder, kept in the cache folder.

A matrix becomes codes and scales as in Q8_0: one scale in half precision for 32 neighbours. Norms, routers and
embeddings that are no head as well stay as they are. The files have the form of `tensor_files.py`; their checksums lie
beside them, and what has changed is made anew.
"""

import hashlib
import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.core.checksums import is_intact, write_list
from blockpilot.core.config import cache_dir
from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BlockCodes
from blockpilot.models.config import DecoderConfig
from blockpilot.models.packing import require_kernels, require_packable
from blockpilot.models.tensor_files import (
    CODES,
    SCALES,
    STORAGE,
    STORAGES,
    SafetensorsFolder,
    read_safetensors_folder,
    write_safetensors_folder,
)
from blockpilot.models.weights import check_decoder, is_coded, read_decoder_config, read_floats

logger = logging.getLogger(__name__)
FORMATS = ("q8_0",)


def quantize_folder(folder: Path, kind: str) -> Path:
    """The folder with a model's weights in codes; made when it is first asked for and after the model has changed."""
    if kind not in FORMATS:
        raise InputError(f"unknown format {kind!r} to quantize to; known: {', '.join(FORMATS)}")
    config = read_decoder_config(folder)
    require_packable(config, str(folder))
    require_kernels()
    place = cache_dir() / "quantized" / f"{folder.resolve().name}-{kind}-{_fingerprint(folder)}"
    if not is_intact(place):
        if place.exists():
            logger.warning("%s is incomplete or damaged, and made anew", place)
        _write(folder, config, place)
    return place


def _write(folder: Path, config: DecoderConfig, place: Path) -> None:
    tensors = read_safetensors_folder(folder)
    table = check_decoder(config, tensors, where=str(folder))
    coded = {source.name for name, row in table.items() if is_coded(name) for source in row}
    if not config.is_tied:
        coded -= {source.name for source in table["embed_tokens.weight"]}
    write_safetensors_folder(place, _pack(tensors, coded, str(folder)), metadata={STORAGE: STORAGES[8]})
    write_list(place)  # last: without it nothing counts


def _fingerprint(folder: Path) -> str:
    """Of the sizes and times of a model's files."""
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(json.dumps([str(folder.resolve()), found]).encode()).hexdigest()[:12]


def _pack(tensors: SafetensorsFolder, coded: set[str], where: str) -> dict[str, Tensor]:
    packed: dict[str, Tensor] = {}
    for name in tensors:
        if name in coded and len(tensors.shape(name)) == 2:
            packed |= _codes(name, read_floats(name, tensors, where=where))
        else:
            packed[name] = tensors[name]
    return packed


def _codes(name: str, weight: Tensor) -> dict[str, Tensor]:
    codes = BlockCodes.quantize_q8_0(weight.float().numpy())
    return {name + CODES: torch.from_numpy(codes.codes), name + SCALES: torch.from_numpy(codes.scales).half()}
