"""Drafters that come with the package, one folder each under `assets/`, every one with its model card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.checksums import is_verified
from blockpilot.core.errors import BlockPilotError
from blockpilot.core.files import hash_file

ASSETS = Path(__file__).resolve().parent.parent / "assets"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Shipped:
    target: str  # the preset it was trained for
    num_bytes: int  # of model.safetensors
    sha256: str


DRAFTERS = {  # the first of a target is its default
    "smollm2-135m-dflash2": Shipped(
        target="smollm2-135m",
        num_bytes=14_291_096,
        sha256="1211e8aba3a989ab2dec4c90ea6b9b4095092f59c8b1d9ba6aa64bd9c6f54e40",
    ),
    "smollm2-135m-eagle3": Shipped(
        target="smollm2-135m",
        num_bytes=7_295_840,
        sha256="aae487f378cc5a5221f922d2aa196e5a20f30392c888788d6f741d4b389519f8",
    ),
    "smollm2-135m-dflash": Shipped(
        target="smollm2-135m",
        num_bytes=3_771_656,
        sha256="56774d81e67c4e31854bb7af68794751bb5fa50608e72360c76d7902eae13b42",
    ),
}


def shipped_drafter(target: str) -> str | None:
    """The name of the drafter that ships for a preset target, if there is one."""
    return next((name for name, drafter in DRAFTERS.items() if drafter.target == target), None)


def default_drafter(target: str) -> str:
    """What drafts where the user names nothing: the drafter that ships for a target, or n-gram lookup."""
    return shipped_drafter(target) or "ngram"


def shipped_folder(name: str) -> Path | None:
    """The folder of a drafter known by name."""
    return ASSETS / name if name in DRAFTERS else None


def checked_folder(name: str) -> Path:
    """The folder, to load it: the weights' checksum is computed if they have changed since it was last right."""
    weights = ASSETS / name / WEIGHTS
    return _require(name, weights.is_file() and is_verified(weights, DRAFTERS[name].sha256))


def verify_shipped(name: str) -> Path:
    """The folder, after its weights' checksum was computed again."""
    weights = ASSETS / name / WEIGHTS
    return _require(name, weights.is_file() and hash_file(weights) == DRAFTERS[name].sha256)


def _require(name: str, is_right: bool) -> Path:
    if not is_right:
        raise BlockPilotError(f"{ASSETS / name / WEIGHTS} is missing or damaged: install the package again")
    return ASSETS / name


def list_shipped() -> list[dict[str, Any]]:
    """One row per drafter, like `list_presets`."""
    return [
        {
            "name": name,
            "kind": "drafter",
            "path": str(ASSETS / name),
            "bytes": drafter.num_bytes,
            "sha256": drafter.sha256,
            "cached": (ASSETS / name / WEIGHTS).is_file(),
        }
        for name, drafter in DRAFTERS.items()
    ]
