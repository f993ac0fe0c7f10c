"""The manifest of a folder that a run writes shard by shard: who made it, and whether another run may go on with it."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockpilot.core import files
from blockpilot.core.errors import InputError

MANIFEST = "manifest.json"
_SCHEMA_VERSION = 1


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder of texts or traces; None where there is none."""
    return files.read_manifest(folder / MANIFEST, _SCHEMA_VERSION, "move the folder away and start anew")


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"schema_version": _SCHEMA_VERSION, **content}, indent=2) + "\n"
    files.write_text(folder / MANIFEST, text)


def require_same_run(
    folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, free: Collection[str]
) -> None:
    """Continue only a run of the same making; names what differs. `free` keys may."""
    for key, value in wanted.items():
        if found.get(key) != value and key not in free:
            raise InputError(
                f"{folder} belongs to another run: {key} is {found.get(key)!r} there and {value!r} here; "
                "choose another --out"
            )
