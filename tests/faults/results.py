"""What a run leaves, as values to compare: files by their bytes where these are always the same, else without times."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

# in names of what follows from times
_TIMED = ("second", "memory", "speedup", "time_to", "over_best", "best_fixed")
_TORN = (".jsonl",)  # files that grow: a crash may cut off their last line


def read_results(out: Path) -> dict[str, Any]:
    """Name -> content of every file with a real name."""
    return {name: _read(out / name) for name in sorted(real_names(out))}


def find_hidden(out: Path) -> list[str]:
    """Locks and leftovers."""
    return [str(path.relative_to(out)) for path in out.rglob(".*")]


def real_names(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")}


def find_halves(out: Path, results: dict[str, Any]) -> list[str]:
    """Files of a crashed run that have a real name and are not whole."""
    return [name for name in sorted(real_names(out)) if not _is_whole(out / name, results.get(name))]


def find_kept(out: Path) -> dict[str, Any]:
    """What another run must leave as it is: files that were written for good, and whole lines of steps and answers."""
    kept: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.name.startswith("shard-") or path.name == "prompts.json":
            kept[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    if (out / "checkpoint.pt").is_file():
        step = _load(out / "checkpoint.pt")["step"]
        kept["log.jsonl"] = [line for line in _lines(out / "log.jsonl") if json.loads(line)["step"] <= step]
    if (out / "answers.jsonl").is_file():
        rows = [(json.loads(line), line) for line in _lines(out / "answers.jsonl")]
        rounds = [(row["task"], row["batch"], row["repeat"]) for row, _ in rows]
        kept["answers.jsonl"] = [line for (_, line), key in zip(rows, rounds, strict=True) if rounds.count(key) == 3]
    return kept


def is_kept(before: Any, after: Any) -> bool:
    return before == after if isinstance(before, tuple) else after[: len(before)] == before


def _is_whole(path: Path, expected: Any) -> bool:
    try:
        found = _read(path)
    except (ValueError, RuntimeError):
        return False
    return not isinstance(expected, bytes) or found == expected


def _read(path: Path) -> Any:
    if path.suffix == ".pt":
        state = _load(path)
        weights = b"".join(tensor.numpy().tobytes() for tensor in state["model"].values())
        return state["step"], hashlib.sha256(weights).hexdigest()
    if path.suffix in _TORN:
        return [_without_times(json.loads(line)) for line in _lines(path)]
    if path.name == "manifest.json":
        return {key: value for key, value in json.loads(path.read_text()).items() if key != "sessions"}
    return path.read_bytes()


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def _lines(path: Path) -> list[str]:
    """Whole ones."""
    return path.read_text().split("\n")[:-1] if path.is_file() else []


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_times(one) for key, one in value.items() if not any(word in key for word in _TIMED)}
