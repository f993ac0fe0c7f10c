"""Packs a drafter for the package: matrices of a trained (bfloat16) folder become 8-bit codes, at half the size.

    python recipes/pack_drafter.py --drafter DIR --out src/blockpilot/assets/NAME

Both folders hold `config.json` and `model.safetensors`; the layout is described in `models/packed_storage.py`. A folder
that is packed already gives the same bytes again. Prints the size and checksum that `models/shipped.py` lists.
"""

import argparse
import json
from pathlib import Path

from blockpilot.core.files import hash_file, write_text
from blockpilot.models.tensor_files import SINGLE_FILE, read_safetensors_folder, write_safetensors_folder
from blockpilot.models.weights import read_config


def pack(drafter: Path, out: Path) -> Path:
    """Write the packed form of a drafter's folder; the file of its weights."""
    config = read_config(drafter / "config.json")
    write_safetensors_folder(out, read_safetensors_folder(drafter), is_packed=True)
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    return out / SINGLE_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    weights = pack(arguments.drafter, arguments.out)
    print(json.dumps({"num_bytes": weights.stat().st_size, "sha256": hash_file(weights)}))


if __name__ == "__main__":
    main()
