"""The manifest of a folder that a run writes: who made it, and whether another run may go on with it."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import read_json, write_text

MANIFEST = "manifest.json"
_SCHEMA_VERSION = 1
_ADVICE = "move the folder away and start anew"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder of texts or traces; None where there is none."""
    manifest = read_json(folder / MANIFEST, _ADVICE)
    if manifest is not None and (version := manifest.get("schema_version")) != _SCHEMA_VERSION:
        where = folder / MANIFEST
        raise InputError(f"{where}: schema version {version}, this program reads {_SCHEMA_VERSION}; {_ADVICE}")
    return manifest


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"schema_version": _SCHEMA_VERSION, **content}, indent=2) + "\n"
    write_text(folder / MANIFEST, text)


def open_run(folder: Path, identity: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
    """Begin a run in an empty folder, or continue one of the same making."""
    found = read_manifest(folder)
    if found is None:
        write_manifest(folder, {**identity, "is_complete": False})
    else:
        require_same_run(folder, found, identity, free=free)


def require_same_run(
    where: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, free: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Continue only a run of the same making: an error names the key that differs, and what it is there and here.

    What `found` says beyond the keys of `wanted` does not matter. Keys named in `free` may differ: these are returned
    with both values.
    """
    differing = find_differing({key: found.get(key) for key in wanted}, wanted)
    for key, (there, here) in differing.items():
        if key.rpartition(".")[2] not in free:
            raise InputError(
                f"{where} belongs to another run: {key} is {there!r} there and {here!r} here; choose another --out"
            )
    return differing


def find_differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every key whose values differ, with both of them."""
    theirs, ours = _flatten(found), _flatten(wanted)
    pairs = {key: (theirs.get(key), ours.get(key)) for key in {**ours, **theirs}}
    return {key: (there, here) for key, (there, here) in pairs.items() if there != here}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined with dots, so that an error names the very key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat
