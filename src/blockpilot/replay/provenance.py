"""Who made a folder of traces: models, settings, prompts. A run continues only what was made alike."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockpilot import __version__
from blockpilot.core.errors import InputError
from blockpilot.engine.llm import LLM
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.trace_files import read_manifest, write_manifest

NOT_COMPARED = ("package_version",)


def describe_run(
    llm: LLM, requests: Sequence[ReplayRequest], config: CollectConfig, source: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of a run, apart from what it will have counted at its end."""
    drafter = llm.drafter
    assert drafter is not None
    description = {
        "package_version": __version__,
        "target": llm.target_name,
        "drafter": drafter.name,
        **source,
        "device": llm.device_type,
        "dtype": llm.config.dtype,
        "is_estimate": llm.config.dtype != "float32",  # one pass and many round differently
        **asdict(config),
        "context_length": llm.engine.context_length,
        "vocab_size": llm.engine.runner.decoder.config.vocab_size,
        "trained_block_size": drafter.block_size,
        "max_block_size": drafter.max_block_size,
        "num_requests": len(requests),
        "requests_sha256": hash_text(json.dumps([asdict(request) for request in requests])),
    }
    return json.loads(json.dumps(description))


def check_run(out: Path, identity: Mapping[str, Any]) -> None:
    """Continue only a run of the same making; names what differs."""
    found = read_manifest(out)
    if found is None:
        write_manifest(out, {**identity, "is_complete": False})
        return
    for key, value in identity.items():
        if found.get(key) != value and key not in NOT_COMPARED:
            raise InputError(
                f"{out} belongs to another run: {key} is {found.get(key)!r} there and {value!r} here; "
                "choose another --out"
            )


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_weights(folder: Path) -> str:
    """Of a folder's weights: the file's own sum where there is one, else the sum of all sums in order."""
    return _join_hashes(hash_file(path) for path in sorted(folder.glob("*.safetensors")))


def _join_hashes(hashes: Iterable[str]) -> str:
    found = list(hashes)
    return found[0] if len(found) == 1 else hash_text("".join(found))
