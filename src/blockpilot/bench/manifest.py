"""Who made a folder of results: code, machine, models, prompts, settings. A run continues only what was made alike."""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

import torch

from blockpilot import __version__
from blockpilot.bench.audit import GAPS
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.methods import Method
from blockpilot.bench.reference import Reference
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import InputError
from blockpilot.core.files import write_text
from blockpilot.core.manifests import MANIFEST, MAX_BYTES, RESULTS, require_room, require_same_run
from blockpilot.core.reading import convert, read_json
from blockpilot.engine.llm import LLM
from blockpilot.engine.profile import profile_key
from blockpilot.models.loading import resolve_folder
from blockpilot.replay.collect import hash_weights

_ADVICE = "choose another --out"
_PACKAGES = ("torch", "numpy", "numba", "tokenizers")


class _Stored(TypedDict):
    """What a run that goes on needs beside its description."""

    id: str
    sessions: list[dict[str, Any]]


def describe_run(
    config: BenchConfig,
    methods: Sequence[Method],
    tasks: Sequence[TaskPrompts],
    plain: LLM,
    drafters: Mapping[str, Any],
    reference: Reference | None = None,
) -> dict[str, Any]:
    """What must be the same for a run to go on; its digest is the run's id."""
    key = profile_key(plain)
    description = {
        "arguments": asdict(config),
        "methods": {method.name: _method_facts(method) for method in methods},
        "prompts": {task.name: _describe_prompts(task) for task in tasks},
        "target": Path(plain.target_name).name,
        "drafters": {kind: _describe_drafter(spec) for kind, spec in drafters.items() if kind in ("dflash", "eagle3")},
        "device": key["device"],
        "dtype": key["dtype"],
        "linear_backend": key["backend"],
        "num_threads": key["num_threads"],
        "near_tie_gap": None if plain.is_exact else GAPS[key["dtype"]],
        "reference": reference and reference.describe(),
        "versions": _describe_versions(),
    }
    if plain.config.own_shapes:
        description["own_shapes"] = plain.config.own_shapes
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    return json.loads(json.dumps({"id": digest, **description}))


def _method_facts(method: Method) -> dict[str, str]:
    """Drafter and pilot; of a pilot folder its name and checksum."""
    if method.pilot.startswith("prefill:"):
        folder = Path(method.pilot.partition(":")[2])
        return {"drafter": method.drafter, "pilot": f"prefill:{folder.name}", "sha256": hash_weights(folder)}
    return {"drafter": method.drafter, "pilot": method.pilot}


def open_run(out: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest to go on with: a new one, or the one that is there if it was made alike."""
    require_room(out, RESULTS)
    found = read_json(out / MANIFEST, advice=_ADVICE, most=MAX_BYTES)
    has_answers = any(out.glob("*.jsonl"))
    if found is None and has_answers:
        raise InputError(f"{out} holds other files (*.jsonl) and no {MANIFEST}: choose another --out")
    if found is None or not has_answers:  # a run that was refused may be told other things
        found = {**description, "is_complete": False, "sessions": []}
    require_same_run(out, found, description, free=("id",))
    convert(found, _Stored, str(out / MANIFEST), _ADVICE)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found["sessions"] = [*found["sessions"], {"started": started, "git_commit": git_commit()}]
    write(out, found)
    return found


def write(out: Path, manifest: Mapping[str, Any]) -> None:
    write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def git_commit() -> str | None:
    """Of the source tree this package runs from, `+` where it has changes; None where it was installed."""
    folder = Path(__file__).resolve().parent
    try:
        if not _git(folder, "ls-files", Path(__file__).name):
            return None
        return _git(folder, "rev-parse", "HEAD") + ("+" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _describe_versions() -> dict[str, str]:
    versions = {"blockpilot": __version__, "python": platform.python_version(), "system": sys.platform}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _describe_prompts(task: TaskPrompts) -> dict[str, Any]:
    ids = "\n".join(prompt.id for prompt in task.prompts)
    return {
        **task.source,
        "num_prompts": len(task.prompts),
        "ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
        "num_calibration": len(task.calibration),
    }


def _describe_drafter(spec: Any) -> dict[str, str]:
    if not isinstance(spec, str):
        return {"name": type(spec).__name__, "sha256": ""}
    return {"name": Path(spec).name, "sha256": hash_weights(resolve_folder(spec))}


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
