"""Traces small enough to ship: all that a pilot of whole requests learns from, in one compressed shard.

A compact folder is read like any other. What the drafter offered is left out; emitted lengths stay at every anchor. Of
the first token's distribution the likeliest tokens up to a mass are kept, in the order of their ids and rounded to
bfloat16: both make them compress well.
"""

import lzma
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path
from blockpilot.models.shipped import ASSETS
from blockpilot.replay.trace_files import TraceSet, pack_shard, require_alike, shard_path
from blockpilot.replay.traces import PrefillColumns, Trace
from blockpilot.training.manifests import MANIFEST, write_manifest

_PRECISION = "float16"
_SAME = (
    "target",
    "drafter",
    "drafter_sha256",
    "dtype",
    "is_estimate",
    "sizes",
    "anchors",
    "temperature",
    "max_new_tokens",
    "context_length",
    "vocab_size",
    "trained_block_size",
    "max_block_size",
)
_PER_SOURCE = (
    "prompt_files",
    "split",
    "num_prompts",
    "requests_sha256",
    "generation",
    "device",
    "package_version",
    "is_complete",
)


@dataclass(frozen=True)
class Kept:
    """How much of the first token's distribution a compact trace holds."""

    mass: float = 0.99
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1 or self.max_tokens < 1:
            raise InputError(f"a mass of {self.mass} and {self.max_tokens} tokens: keep some, and at most all of them")


def shipped_traces(target: str) -> Path | None:
    """The folder of the traces that ship for a preset target, if there is one."""
    folder = ASSETS / f"{target}-traces"
    return folder if Path(target).name == target and (folder / MANIFEST).is_file() else None


def write_compact(
    folders: Sequence[Path],
    out: Path,
    *,
    kept: Kept,
    max_bytes: int,
    licences: Mapping[str, str],
    is_partial: bool = False,
) -> TraceSet:
    """The traces of folders that were collected alike. `licences` names that of each task's prompts.

    With `is_partial`, also those of folders whose collection was not finished.
    """
    sets = [TraceSet(folder) for folder in folders]
    require_alike(sets, _SAME)
    if not is_partial and (unfinished := [found.folder for found in sets if not found.is_complete]):
        raise InputError(f"{unfinished[0]} is not complete: let `blockpilot collect` finish it first")
    traces = [replace(trace, drafts={}, prefill=_cut(trace.prefill, kept)) for found in sets for trace in found]
    tasks = Counter(trace.task for trace in traces)
    if unknown := sorted(set(tasks) - set(licences)):
        raise InputError(f"the licence of the prompts of {unknown[0]!r} is not known to allow shipping: leave them out")
    data = lzma.compress(pack_shard(traces, _PRECISION), preset=9 | lzma.PRESET_EXTREME)
    if len(data) > max_bytes:
        raise InputError(f"{len(data):,} bytes are more than {max_bytes:,}: keep less mass, or fewer requests")
    if (out / MANIFEST).exists():
        raise InputError(f"{out} holds traces already: choose another --out")
    with atomic_path(shard_path(out, 0, is_compressed=True)) as temporary:
        temporary.write_bytes(data)
    write_manifest(out, _describe(sets, traces, kept) | {"licences": {task: licences[task] for task in sorted(tasks)}})
    return TraceSet(out)


def _cut(prefill: PrefillColumns, kept: Kept) -> PrefillColumns:
    best = np.argsort(-prefill.probabilities, kind="stable")
    count = int((np.cumsum(prefill.probabilities[best].astype(np.float64)) < kept.mass).sum()) + 1
    places = best[: min(count, kept.max_tokens)]
    places = places[np.argsort(prefill.token_ids[places])]
    probabilities = _round(prefill.probabilities[places])
    return replace(
        prefill,
        token_ids=prefill.token_ids[places],
        probabilities=probabilities,
        mass=float(probabilities.sum(dtype=np.float64)),
    )


def _round(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest bfloat16, halves up; all are positive."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _describe(sets: Sequence[TraceSet], traces: Sequence[Trace], kept: Kept) -> dict[str, Any]:
    tasks = Counter(trace.task for trace in traces)
    return {
        **{key: sets[0].manifest.get(key) for key in _SAME},
        "draft_sizes": [],
        "num_candidates": 0,
        "precision": _PRECISION,
        "is_compact": True,
        "kept_mass": kept.mass,
        "max_kept_tokens": kept.max_tokens,
        "num_traces": len(traces),
        "num_answer_tokens": sum(len(trace.answer_ids) for trace in traces),
        "num_disagreements": sum(trace.num_disagreements for trace in traces),
        "num_traces_by_task": dict(sorted(tasks.items())),
        "sources": [{key: found.manifest.get(key) for key in _PER_SOURCE} for found in sets],
        "is_complete": all(found.is_complete for found in sets),
    }
