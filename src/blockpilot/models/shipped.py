"""Drafters that come with the package, one folder each under `assets/`, every one with its model card."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.errors import BlockPilotError

ASSETS = Path(__file__).resolve().parent.parent / "assets"


@dataclass(frozen=True)
class Shipped:
    target: str  # the preset it was trained for
    num_bytes: int  # of model.safetensors
    sha256: str


DRAFTERS = {  # the first of a target is its default
    "smollm2-135m-dflash2": Shipped(
        target="smollm2-135m",
        num_bytes=26_740_792,
        sha256="9fc9e04c675bc2ca10d503cf81a359bf0e0522a5b2e2bce57ed07238456a72b0",
    ),
    "smollm2-135m-eagle3": Shipped(
        target="smollm2-135m",
        num_bytes=13_653_928,
        sha256="e0cd7b213e9f7796c574c99ff1356092d96a2f2f86ddbc4dd0efa49d686bfdc4",
    ),
    "smollm2-135m-dflash": Shipped(
        target="smollm2-135m",
        num_bytes=7_087_816,
        sha256="3f3ebf51a5ac151df77a265cd41564407af9eab4803339bb81023e02c0d0584c",
    ),
}


def shipped_drafter(target: str) -> str | None:
    """The name of the drafter that ships for a preset target, if there is one."""
    return next((name for name, drafter in DRAFTERS.items() if drafter.target == target), None)


def shipped_folder(name: str) -> Path | None:
    """The folder of a drafter known by name."""
    return ASSETS / name if name in DRAFTERS else None


def verify_shipped(name: str) -> Path:
    """The folder, after its weights' checksum was computed again."""
    weights = ASSETS / name / "model.safetensors"
    if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != DRAFTERS[name].sha256:
        raise BlockPilotError(f"{weights} is missing or damaged: install the package again")
    return weights.parent


def list_shipped() -> list[dict[str, Any]]:
    """One row per drafter, like `list_presets`."""
    return [
        {
            "name": name,
            "kind": "drafter",
            "path": str(ASSETS / name),
            "bytes": drafter.num_bytes,
            "sha256": drafter.sha256,
            "cached": (ASSETS / name / "model.safetensors").is_file(),
        }
        for name, drafter in DRAFTERS.items()
    ]
