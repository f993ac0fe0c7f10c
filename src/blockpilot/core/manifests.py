"""The manifest of a folder that a run writes: who made it, and whether another run may go on with it.

Verbs hand folders to each other by name, so one of them may be given a folder of another. `find_content` recognises
it, and the error says which verb's folder was wanted.
"""

import json
import os.path
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, write_text
from blockpilot.core.locks import LOCK
from blockpilot.core.reading import read_json

MANIFEST = "manifest.json"
MAX_BYTES = 16 * MEGABYTE  # of a manifest
TRACES, TEXTS, RESULTS = "traces", "training text", "results"
PILOT, TRAINING, MODEL = "pilot", "checkpoints", "model"
_VERBS = {TRACES: "collect", TEXTS: "synthesize", RESULTS: "bench", PILOT: "train-pilot", TRAINING: "train-drafter"}
_KEYS = {TRACES: {"anchors", "draft_sizes"}, RESULTS: {"arguments"}, TEXTS: {"config"}}  # of their manifests
_FILES = {"pilot.json": PILOT, "checkpoint.pt": TRAINING, "answers.jsonl": RESULTS, "config.json": MODEL}
_SCHEMA_VERSION = 1
_ADVICE = "move the folder away and start anew"


def find_content(folder: Path) -> str | None:
    """What a folder holds; None where nothing of ours is recognised."""
    if (manifest := _read(folder)) is not None:
        return _recognise(manifest)
    return next((content for name, content in _FILES.items() if os.path.isfile(folder / name)), None)


def require_content(folder: Path, wanted: str) -> None:
    """Refuse a folder that holds something else."""
    if (found := find_content(folder)) not in (None, wanted):
        raise InputError(
            f"{folder} holds {_describe(str(found))}, no {wanted}: give a folder of `blockpilot {_VERBS[wanted]}`"
        )


def require_room(folder: Path, content: str) -> None:
    """Refuse to write beside something else."""
    if (found := find_content(folder)) not in (None, content):
        raise InputError(f"{folder} holds {_describe(str(found))}, no {content}: choose another --out")


def _describe(content: str) -> str:
    named = f"a {content}" if content in (PILOT, MODEL) else content
    return f"{named} of `blockpilot {_VERBS[content]}`" if content in _VERBS else named


def _recognise(manifest: Mapping[str, Any]) -> str | None:
    return next((content for content, keys in _KEYS.items() if keys <= manifest.keys()), None)


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return read_json(path, advice=_ADVICE, most=MAX_BYTES) if os.path.isfile(path) else None


def read_manifest(folder: Path, content: str | None = None) -> dict[str, Any] | None:
    """The manifest of a folder of texts or traces; None where there is none. Other content than named is refused."""
    if content is not None:
        require_content(folder, content)
    manifest = _read(folder)
    if manifest is not None and (version := manifest.get("schema_version")) != _SCHEMA_VERSION:
        where = folder / MANIFEST
        raise InputError(f"{where}: schema version {version!r:.40}, this program reads {_SCHEMA_VERSION}; {_ADVICE}")
    return manifest


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"schema_version": _SCHEMA_VERSION, **content}, indent=2) + "\n"
    write_text(folder / MANIFEST, text)


def open_run(folder: Path, identity: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
    """Begin a run in an empty folder, or continue one of the same making."""
    if (content := _recognise(identity)) is not None:
        require_room(folder, content)
    found = read_manifest(folder)
    if found is None or _is_untouched(folder, found):
        write_manifest(folder, {**identity, "is_complete": False})
    else:
        require_same_run(folder, found, identity, free=free)


def _is_untouched(folder: Path, found: Mapping[str, Any]) -> bool:
    """Whether a run has left nothing but its manifest. It was refused; the next may be told other things."""
    return found.get("is_complete") is False and {path.name for path in folder.iterdir()} <= {MANIFEST, LOCK}


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
                f"{where} belongs to another run: {key!s:.80} is {there!r:.80} there and {here!r:.80} here; choose "
                "another --out"
            )
    return differing


def find_differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every key whose values differ, with both of them."""
    theirs, ours = _flatten(found), _flatten(wanted)
    pairs = {key: (theirs.get(key), ours.get(key)) for key in {**ours, **theirs}}
    return {key: (there, here) for key, (there, here) in pairs.items() if there != here}


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys joined with dots, so that an error names the very key. No recursion: files may nest deeply."""
    flat: dict[str, Any] = {}
    left = list(tree.items())[::-1]
    while left:
        key, value = left.pop()
        if isinstance(value, dict) and value:
            left += [(f"{key}.{name}", inner) for name, inner in value.items()][::-1]
        else:
            flat[" ".join(key.split())] = value
    return flat
