"""Trace folders that no honest run writes. A damage is named by the words that its error must hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from blockpilot.core.manifests import MANIFEST
from blockpilot.replay.trace_files import shard_path

Columns = dict[str, np.ndarray]


def change_manifest(folder: Path, **changes: Any) -> None:
    """Without the keys whose new value is None."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / MANIFEST).write_text(json.dumps(kept), encoding="utf-8")


def change_shard(folder: Path, change: Callable[[Columns], Columns], strings: object = None) -> None:
    """Other columns in the first shard; other strings of its requests where they are given."""
    path = shard_path(folder, 0)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    told = header["__metadata__"]["requests"] if strings is None else json.dumps(strings)
    columns = {name: np.ascontiguousarray(column) for name, column in change(load_file(path)).items()}
    path.write_bytes(save(columns, {"requests": told}))


def put(name: str, value: Callable[[np.ndarray], Any]) -> Callable[[Columns], Columns]:
    return lambda columns: columns | {name: np.asarray(value(columns[name]))}


def fill(name: str, value: float) -> Callable[[Columns], Columns]:
    return put(name, lambda column: np.full_like(column, value))


def drop(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {other: column for other, column in columns.items() if other != name}


BAD_MANIFESTS: dict[str, dict[str, Any]] = {
    "required field target": {"target": None},
    "required field sizes": {"sizes": None},
    "Expected array, got str, at sizes": {"sizes": "2,3"},
    "Expected int <= 64, at sizes": {"sizes": [2, 99]},
    "Expected int >= 2, at sizes": {"sizes": [-1]},
    "Expected array of length >= 1, at sizes": {"sizes": [], "draft_sizes": []},
    "sizes do not rise": {"sizes": [3, 2, 8]},
    "Expected int <= 64, at draft_sizes": {"draft_sizes": [65]},
    "a draft size is named twice": {"draft_sizes": [3, 3]},
    "Invalid enum value 'some', at anchors": {"anchors": "some"},
    "Expected int >= 1, at vocab_size": {"vocab_size": 0},
    "Expected int <= 1048576, at vocab_size": {"vocab_size": 2**40},
    "Expected int, got float, at max_block_size": {"max_block_size": 1.5},
    "holds training text of `blockpilot synthesize`, no traces": {"anchors": None, "config": {"num_written": 1}},
    "holds results of `blockpilot bench`, no traces": {"anchors": None, "arguments": {}, "methods": {}},
    "schema version": {"schema_version": "\n" * 99},
}

BAD_COLUMNS: dict[str, Callable[[Columns], Columns]] = {
    "'answer_ids' is missing": drop("answer_ids"),
    "'emitted' is missing": drop("emitted"),
    "'draft3.entropy' is missing": drop("draft3.entropy"),
    "'draft3.first' is missing": drop("draft3.first"),
    "'magic' is left over": lambda columns: columns | {"magic": np.zeros(1)},
    "'answer_offsets' has the shape": put("answer_offsets", lambda column: column[:-1]),
    "'answer_offsets' does not rise": put("answer_offsets", lambda column: column[::-1]),
    "'answer_offsets' does not rise from 0": put("answer_offsets", lambda column: column * 2),
    "'answer_offsets' does not": put("answer_offsets", lambda column: column - 2**62),
    "'answer_offsets' is of another kind": put("answer_offsets", lambda column: column.astype(np.float32)),
    "'prefill.offsets' does not rise": put("prefill.offsets", lambda column: column - 1),
    "'prefill.token_ids' holds": fill("prefill.token_ids", 10**9),
    "'prefill.probabilities' holds": fill("prefill.probabilities", 7.0),
    "'prefill.mass' holds numbers that are not finite": fill("prefill.mass", np.nan),
    "'prefill.hidden' holds numbers that are not finite": fill("prefill.hidden", np.inf),
    "'prefill.hidden' is of another kind": put("prefill.hidden", lambda column: column[0]),
    "'emitted' leads out of an answer": fill("emitted", 200),
    "'emitted' leads out of an answer, or nowhere": fill("emitted", 0),
    "'emitted' has the shape": put("emitted", lambda column: column[:, :2]),
    "'draft3.log_probs' has the shape": put("draft3.log_probs", lambda column: column[:-1]),
    "'draft8.true_ranks' has the shape": put("draft8.true_ranks", lambda column: column[:, 1:]),
    "'draft8.pairwise' has the shape": put("draft8.pairwise", lambda column: column[..., 1:]),
    "'draft8.pairwise' holds numbers that are not finite": fill("draft8.pairwise", -np.inf),
    "'temperature' holds": fill("temperature", -1.0),
    "'max_new_tokens' holds": fill("max_new_tokens", -5),
    "'num_prompt_tokens' has the shape": put("num_prompt_tokens", lambda column: column[0]),
    "'answer_ids' holds": fill("answer_ids", -1),
}

BAD_STRINGS: dict[str, object] = {
    "its requests: Expected array, got object": {},
    "its requests: Object missing required field task": [{"prompt_id": "x", "finish_reason": "stop"}],
    "its requests: Expected str, got int": [{"prompt_id": 3, "task": "x", "finish_reason": "stop"}],
    "'N'|has the shape": [],
}
