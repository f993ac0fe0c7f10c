"""Drafters that come with the package, one folder each under `assets/`, every one with its model card."""

import hashlib
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DRAFTERS = {"smollm2-135m-dflash2": "smollm2-135m"}  # drafter -> the preset it was trained for


def shipped_drafter(target: str) -> str | None:
    """The name of the drafter that ships for a preset target, if there is one."""
    return next((name for name, made_for in DRAFTERS.items() if made_for == target), None)


def shipped_folder(name: str) -> Path | None:
    """The folder of a drafter known by name."""
    return ASSETS / name if name in DRAFTERS else None


def list_shipped() -> list[dict[str, Any]]:
    """One row per drafter, like `list_presets`."""
    return [_describe(name, ASSETS / name / "model.safetensors") for name in DRAFTERS]


def _describe(name: str, weights: Path) -> dict[str, Any]:
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    size = weights.stat().st_size
    return {
        "name": name,
        "kind": "drafter",
        "path": str(weights.parent),
        "bytes": size,
        "sha256": digest,
        "cached": True,
    }
