"""Traces on disk: a folder with `manifest.json` and shards, one tensor per column.

Requests lie back to back in every column; `answer_offsets` says where each begins (an answer of n tokens has n - 1
anchors). Shards are written whole or not at all, and the same requests give the same bytes, so that an interrupted
collection goes on behind its last shard. A shard whose name ends in `.xz` is compressed: traces that ship are (made by
`recipes/make_compact_traces.py`).
"""

import json
import os.path
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.columns import Columns, Promise, read_columns
from blockpilot.core.errors import InputError
from blockpilot.core.files import write_bytes
from blockpilot.core.manifests import MANIFEST, TRACES, read_manifest
from blockpilot.core.reading import convert, decode_json
from blockpilot.models.shipped import ASSETS
from blockpilot.replay.trace_checks import (
    RequestStrings,
    TraceManifest,
    check_promises,
    check_sizes,
    check_values,
    widths,
)
from blockpilot.replay.traces import DraftColumns, PrefillColumns, Trace, TraceSetting

_SHARD_NAMES = (".safetensors", ".safetensors.xz")  # plain, compressed
_MAX_BYTES = 2**32  # of a shard, once it is unpacked
_AGAIN = "delete it and run `blockpilot collect` again"
_ADVICE = "move the folder away and run `blockpilot collect` again"
_REQUESTS = "requests"  # the one metadata key of a shard: its strings. A second key would come in random order
_REQUEST_COLUMNS = {  # one value per request
    "num_prompt_tokens": np.int32,
    "temperature": np.float64,
    "seed": np.int64,
    "max_new_tokens": np.int32,
    "num_disagreements": np.int32,
}
_LOGITS = "prefill.logits"  # only where they were asked for; float16 holds those of a bfloat16 target as they are
# the last two only where the drafter scores a child given its parent
_DRAFT_COLUMNS = ("log_probs", "entropy", "true_ranks", "first", "pairwise")


class TraceSet:
    """The traces of a folder in order; one shard at a time is in memory."""

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder, TRACES)
        if manifest is None:
            raise InputError(f"{folder} holds no traces: run `blockpilot collect --out {folder}` first")
        where = str(folder / MANIFEST)
        self.checked: TraceManifest = convert(manifest, TraceManifest, where, _ADVICE)
        try:
            check_sizes(self.checked)
        except ValueError as error:
            raise InputError(f"{where}: {error}; {_ADVICE}") from error
        self.folder, self.manifest = folder, manifest
        self.setting = TraceSetting(
            sizes=tuple(self.checked["sizes"]),
            trained_block_size=self.checked["trained_block_size"],
            max_block_size=self.checked["max_block_size"],
            vocab_size=self.checked["vocab_size"],
            is_every_anchor=self.checked["anchors"] == "every",
        )

    @property
    def shards(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("shard-*") if path.name.endswith(_SHARD_NAMES))

    @property
    def is_complete(self) -> bool:
        return bool(self.manifest.get("is_complete"))

    def __len__(self) -> int:
        return sum(len(self._read(path)[1]) for path in self.shards)

    def __iter__(self) -> Iterator[Trace]:
        found: tuple[int, ...] | None = None
        count = 0
        for path in self.shards:
            columns, strings = self._read(path)
            shared = widths(columns, self.checked["draft_sizes"])
            if found not in (None, shared):
                raise InputError(f"{path} is of another run than the shards before it: move it away")
            found, count = shared, count + len(strings)
            yield from _unpack(columns, strings, self.setting, self.checked["draft_sizes"])
        if self.is_complete and count != (counted := self.checked.get("num_traces", count)):
            raise InputError(f"{self.folder} holds {count} traces and its manifest counts {counted}: {_ADVICE}")

    def _read(self, path: Path) -> tuple[Columns, list[RequestStrings]]:
        """A shard's columns, and the strings of its requests."""
        if not os.path.isfile(path):
            raise InputError(f"{path} is no file: {_AGAIN}")
        strings: list[RequestStrings] = []

        def check(promises: dict[str, Promise], metadata: dict[str, str]) -> None:
            strings.extend(decode_json(metadata.get(_REQUESTS, ""), list[RequestStrings], "its requests"))
            check_promises(promises, self.checked, len(strings))

        columns, _ = read_columns(path, check, most=_MAX_BYTES, advice=_AGAIN)
        try:
            check_values(columns, self.checked)
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}; {_AGAIN}") from error
        return columns, strings


def shipped_traces(target: str) -> Path | None:
    """The folder of the traces that ship for a preset target, if there is one."""
    folder = ASSETS / f"{target}-traces"
    return folder if Path(target).name == target and os.path.isfile(folder / MANIFEST) else None


def require_alike(sets: Sequence[TraceSet], keys: Sequence[str], like: Mapping[str, Any] | None = None) -> None:
    """Refuse folders whose manifests differ in one of `keys` from `like`, or from the first folder's."""
    first = sets[0].manifest if like is None else like
    for found in sets:
        for key in keys:
            if found.manifest.get(key) != first.get(key):
                raise InputError(
                    f"{found.folder} was collected otherwise: {key} is {found.manifest.get(key)!r} there and "
                    f"{first.get(key)!r} elsewhere"
                )


def require_disjoint(train: Sequence[Trace], test: Sequence[Trace]) -> None:
    """Refuse to judge by prompts that were learned from."""
    seen = {(trace.task, trace.prompt_id) for trace in train}
    if both := [trace for trace in test if (trace.task, trace.prompt_id) in seen]:
        raise InputError(f"{len(both)} prompts are in training and test traces, such as {both[0].prompt_id!r}")


def shard_path(folder: Path, index: int, *, is_compressed: bool = False) -> Path:
    return folder / f"shard-{index:05d}{_SHARD_NAMES[is_compressed]}"


def write_shard(path: Path, traces: Sequence[Trace], precision: str) -> None:
    write_bytes(path, pack_shard(traces, precision))


def pack_shard(traces: Sequence[Trace], precision: str) -> bytes:
    """A shard as it stands in its file."""
    from safetensors.numpy import save

    strings = [{"prompt_id": t.prompt_id, "task": t.task, "finish_reason": t.finish_reason} for t in traces]
    columns = {name: np.ascontiguousarray(column) for name, column in _pack(traces, np.dtype(precision)).items()}
    return save(columns, metadata={_REQUESTS: json.dumps(strings)})


def _pack(traces: Sequence[Trace], floats: np.dtype[Any]) -> Columns:
    prefills = [trace.prefill for trace in traces]
    columns: Columns = {
        **{name: np.array([getattr(t, name) for t in traces], dtype) for name, dtype in _REQUEST_COLUMNS.items()},
        "answer_ids": np.concatenate([trace.answer_ids for trace in traces]),
        "answer_offsets": _offsets([len(trace.answer_ids) for trace in traces]),
        "emitted": np.concatenate([trace.emitted for trace in traces]),
        "prefill.token_ids": np.concatenate([prefill.token_ids for prefill in prefills]),
        "prefill.probabilities": np.concatenate([prefill.probabilities for prefill in prefills]),
        "prefill.offsets": _offsets([len(prefill.token_ids) for prefill in prefills]),
        "prefill.mass": np.array([prefill.mass for prefill in prefills], np.float32),
        "prefill.entropy": np.array([prefill.entropy for prefill in prefills], np.float32),
        "prefill.hidden": _rounded(np.stack([prefill.hidden for prefill in prefills]), floats),
    }
    if logits := [prefill.logits for prefill in prefills if prefill.logits is not None]:
        columns[_LOGITS] = _rounded(np.stack(logits), floats)
    for size in traces[0].drafts:
        for name in _DRAFT_COLUMNS:
            parts = [getattr(trace.drafts[size], name) for trace in traces]
            if parts[0] is not None:
                column = np.concatenate(parts)
                columns[f"draft{size}.{name}"] = column if name == "true_ranks" else _rounded(column, floats)
    return columns


def _unpack(
    columns: Columns, strings: Sequence[RequestStrings], setting: TraceSetting, draft_sizes: Sequence[int]
) -> Iterator[Trace]:
    prefill_bounds = list(pairwise(columns["prefill.offsets"].tolist()))
    for row, (start, end) in enumerate(pairwise(columns["answer_offsets"].tolist())):
        anchors = slice(start - row, end - row - 1)
        drafts: dict[int, DraftColumns] = {}
        for size in draft_sizes:
            names = [name for name in _DRAFT_COLUMNS if f"draft{size}.{name}" in columns]
            found: dict[str, Any] = {name: columns[f"draft{size}.{name}"][anchors] for name in names}
            drafts[size] = DraftColumns(**found)
        kept = slice(*prefill_bounds[row])
        yield Trace(
            **strings[row],
            **{name: columns[name][row].item() for name in _REQUEST_COLUMNS},
            answer_ids=columns["answer_ids"][start:end],
            emitted=columns["emitted"][anchors],
            prefill=PrefillColumns(
                token_ids=columns["prefill.token_ids"][kept],
                probabilities=columns["prefill.probabilities"][kept],
                mass=float(columns["prefill.mass"][row]),
                entropy=float(columns["prefill.entropy"][row]),
                hidden=columns["prefill.hidden"][row],
                logits=columns[_LOGITS][row] if _LOGITS in columns else None,
            ),
            drafts=drafts,
            setting=setting,
        )


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _rounded(values: NDArray[Any], floats: np.dtype[Any]) -> NDArray[Any]:
    """In the stored precision; what float16 cannot hold becomes its largest number, not infinity."""
    largest = np.finfo(floats).max
    return np.clip(values, -largest, largest).astype(floats)
