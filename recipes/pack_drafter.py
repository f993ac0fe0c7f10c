"""Packs a drafter for the package: matrices of a trained (bfloat16) folder become 8-bit codes, at half the size.

    python recipes/pack_drafter.py --drafter DIR --out src/blockpilot/assets/NAME

Both folders hold `config.json` and `model.safetensors`; the layout is described in `models/tensor_files.py`. A folder
that is packed already gives the same bytes again. Prints the size and checksum that `models/shipped.py` lists.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.core.files import hash_file, write_text
from blockpilot.models.block_codes import BLOCK, BlockCodes
from blockpilot.models.tensor_files import (
    CODES,
    METADATA,
    SCALES,
    SINGLE_FILE,
    read_safetensors_folder,
    write_safetensors_folder,
)
from blockpilot.models.weights import read_config


def pack(drafter: Path, out: Path) -> Path:
    """Write the packed form of a drafter's folder; the file of its weights."""
    config = read_config(drafter / "config.json")
    write_packed(out, read_safetensors_folder(drafter))
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    return out / SINGLE_FILE


def write_packed(out: Path, tensors: Mapping[str, Tensor]) -> None:
    write_safetensors_folder(out, pack_tensors(tensors), metadata=METADATA)


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a packed file holds of these tensors."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] % BLOCK == 0:
            blocks = BlockCodes.quantize(tensor.float().numpy())
            packed[name + CODES] = torch.from_numpy(blocks.codes)
            packed[name + SCALES] = torch.from_numpy(blocks.scales).bfloat16()
        else:
            packed[name] = tensor
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    weights = pack(arguments.drafter, arguments.out)
    print(json.dumps({"num_bytes": weights.stat().st_size, "sha256": hash_file(weights)}))


if __name__ == "__main__":
    main()
