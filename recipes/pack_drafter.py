"""Packs a drafter for the package: matrices of a trained (bfloat16) folder become 8-bit codes, or 6-bit ones.

    python recipes/pack_drafter.py --drafter DIR --out src/blockpilot/assets/NAME [--bits 6]

Both folders hold `config.json` and `model.safetensors`; the layout is described in `models/tensor_files.py`. A folder
that is packed already gives the same bytes again, with as many bits. Prints the size and checksum that
`models/shipped.py` lists.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.core.files import hash_file, write_text
from blockpilot.models.block_codes import BLOCK, BlockCodes, pack_six_bits
from blockpilot.models.tensor_files import (
    CODES,
    SCALES,
    SINGLE_FILE,
    STORAGE,
    STORAGES,
    read_safetensors_folder,
    write_safetensors_folder,
)
from blockpilot.models.weights import read_config


def pack(drafter: Path, out: Path, bits: int = 8) -> Path:
    """Write the packed form of a drafter's folder; the file of its weights."""
    config = read_config(drafter / "config.json")
    write_packed(out, read_safetensors_folder(drafter), bits)
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    return out / SINGLE_FILE


def write_packed(out: Path, tensors: Mapping[str, Tensor], bits: int = 8) -> None:
    # this key alone: several are written in any order, and files would differ
    write_safetensors_folder(out, pack_tensors(tensors, bits), metadata={STORAGE: STORAGES[bits]})


def pack_tensors(tensors: Mapping[str, Tensor], bits: int = 8) -> dict[str, Tensor]:
    """What a packed file holds of these tensors."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] % BLOCK == 0:
            blocks = BlockCodes.quantize(tensor.float().numpy(), bits=bits)
            packed[name + CODES] = torch.from_numpy(blocks.codes if bits == 8 else pack_six_bits(blocks.codes))
            packed[name + SCALES] = torch.from_numpy(blocks.scales).bfloat16()
        else:
            packed[name] = tensor
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--bits", type=int, choices=sorted(STORAGES), default=8, help="of a code")
    arguments = parser.parse_args()
    weights = pack(arguments.drafter, arguments.out, arguments.bits)
    print(json.dumps({"num_bytes": weights.stat().st_size, "sha256": hash_file(weights)}))


if __name__ == "__main__":
    main()
