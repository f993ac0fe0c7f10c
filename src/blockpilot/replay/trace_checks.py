"""What the files of traces must hold to be read as traces: replay indexes with these numbers, and walks by them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
import numpy as np

from blockpilot.core.columns import Columns, Promise
from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.reading import Count

BlockSize = Annotated[int, msgspec.Meta(ge=2, le=MAX_BLOCK_SIZE)]
_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_INTEGERS, _FLOATS = "iu", "f"  # kinds of NumPy
_MAX_TEMPERATURE = 1e4
Axis = str | int
# by name: kind, and axes. Letters are lengths that every column with that letter shares: N requests, T tokens of
# answers, A anchors, P kept first tokens, H hidden size; O = N + 1. K4 are the candidates of draft size 4
_COLUMNS: dict[str, tuple[str, tuple[Axis, ...]]] = {
    "num_prompt_tokens": (_INTEGERS, ("N",)),
    "temperature": (_FLOATS, ("N",)),
    "seed": (_INTEGERS, ("N",)),
    "max_new_tokens": (_INTEGERS, ("N",)),
    "num_disagreements": (_INTEGERS, ("N",)),
    "answer_ids": (_INTEGERS, ("T",)),
    "answer_offsets": (_INTEGERS, ("O",)),
    "prefill.token_ids": (_INTEGERS, ("P",)),
    "prefill.probabilities": (_FLOATS, ("P",)),
    "prefill.offsets": (_INTEGERS, ("O",)),
    "prefill.mass": (_FLOATS, ("N",)),
    "prefill.entropy": (_FLOATS, ("N",)),
    "prefill.hidden": (_FLOATS, ("N", "H")),
}


class TraceManifest(TypedDict):
    """What replay needs of manifest.json."""

    target: _Name
    drafter: _Name
    sizes: Annotated[list[BlockSize], msgspec.Meta(min_length=1)]
    draft_sizes: list[BlockSize]
    trained_block_size: _Limit
    max_block_size: _Limit
    vocab_size: _Limit
    anchors: Literal["every", "visited"]
    whole_logits: NotRequired[bool]  # a column with the first token's logits, all of them
    is_complete: NotRequired[bool]
    num_traces: NotRequired[Count]  # once it is complete


class RequestStrings(TypedDict):
    prompt_id: str
    task: str
    finish_reason: str


def check_sizes(manifest: TraceManifest) -> None:
    """ValueError where the sizes contradict each other."""
    if any(size >= larger for size, larger in zip(manifest["sizes"], manifest["sizes"][1:], strict=False)):
        raise ValueError("sizes do not rise")
    if len(set(manifest["draft_sizes"])) < len(manifest["draft_sizes"]):
        raise ValueError("a draft size is named twice")


def check_promises(promises: Mapping[str, Promise], manifest: TraceManifest, num_requests: int) -> None:
    """ValueError where a column is missing, left over, of another kind, or of another length than the others."""
    wanted = _wanted_columns(promises, manifest)
    if odd := sorted(wanted.keys() ^ promises.keys()):
        raise ValueError(f"its column {odd[0]!r:.80} is {'left over' if odd[0] in promises else 'missing'}")
    num_tokens = sum(promises["answer_ids"].shape[:1])
    lengths = {"N": num_requests, "O": num_requests + 1, "T": num_tokens, "A": num_tokens - num_requests}
    for name, (kinds, axes) in wanted.items():
        found = promises[name]
        if found.dtype.kind not in kinds or len(found.shape) != len(axes):
            raise ValueError(f"its column {name!r} is of another kind")
        for axis, length in zip(axes, found.shape, strict=True):
            is_empty = str(axis).startswith("K") and not length
            if is_empty or length != (axis if isinstance(axis, int) else lengths.setdefault(axis, length)):
                raise ValueError(f"its column {name!r} has the shape {found.shape}, which does not fit the others")


def _wanted_columns(
    promises: Mapping[str, Promise], manifest: TraceManifest
) -> dict[str, tuple[str, tuple[Axis, ...]]]:
    wanted = _COLUMNS | {"emitted": (_INTEGERS, ("A", len(manifest["sizes"])))}
    if manifest.get("whole_logits"):
        wanted["prefill.logits"] = (_FLOATS, ("N", manifest["vocab_size"]))
    for size in manifest["draft_sizes"]:
        name, depth = f"draft{size}", size - 1
        wanted[f"{name}.log_probs"] = (_FLOATS, ("A", depth, f"K{size}"))
        wanted[f"{name}.entropy"] = (_FLOATS, ("A", depth))
        wanted[f"{name}.true_ranks"] = ("u", ("A", depth))
        if f"{name}.first" in promises or f"{name}.pairwise" in promises:
            wanted[f"{name}.first"] = (_FLOATS, ("A", f"K{size}"))
            wanted[f"{name}.pairwise"] = (_FLOATS, ("A", depth - 1, f"K{size}", f"K{size}"))
    return wanted


def check_values(columns: Columns, manifest: TraceManifest) -> None:
    """ValueError where a number would lead out of an answer, or is none."""
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise ValueError(f"its column {name!r} holds numbers that are not finite")
    _require(columns["answer_ids"], 0, 2**31, "answer_ids")  # nothing is looked up by them
    _require(columns["prefill.token_ids"], 0, manifest["vocab_size"] - 1, "prefill.token_ids")
    for name in ("num_prompt_tokens", "max_new_tokens"):
        _require(columns[name], 1, 2**31, name)
    _require(columns["temperature"], 0, _MAX_TEMPERATURE, "temperature")
    _require(columns["prefill.probabilities"], 0, 1, "prefill.probabilities")
    _check_offsets(columns["answer_offsets"], len(columns["answer_ids"]), "answer_offsets", least=1)
    _check_offsets(columns["prefill.offsets"], len(columns["prefill.token_ids"]), "prefill.offsets", least=0)
    _check_emitted(columns, manifest)


def _require(column: np.ndarray, low: float, high: float, name: str) -> None:
    if len(column) and not (low <= column.min() and column.max() <= high):
        raise ValueError(f"its column {name!r} holds {column.min()} to {column.max()}, not {low} to {high}")


def _check_offsets(offsets: np.ndarray, end: int, name: str, *, least: int) -> None:
    """They begin at 0 and rise to the end; wide numbers first, so that no difference wraps around."""
    steps = np.diff(offsets.astype(object) if offsets.dtype == np.uint64 else offsets.astype(np.int64))
    if offsets[0] != 0 or offsets[-1] != end or (len(steps) and steps.min() < least):
        raise ValueError(f"its column {name!r} does not rise from 0 to {end}")


def _check_emitted(columns: Columns, manifest: TraceManifest) -> None:
    """A step emits what its answer still has and its block can hold; nothing only where no chain stands."""
    emitted, counts = columns["emitted"].astype(np.int64), np.diff(columns["answer_offsets"]) - 1
    ends = np.cumsum(counts)
    left = np.repeat(ends, counts) - np.arange(len(emitted))
    most = np.minimum(left[:, None], np.array(manifest["sizes"])[None])
    least = 1 if manifest["anchors"] == "every" else 0
    if ((emitted < least) | (emitted > most)).any():
        raise ValueError("its column 'emitted' leads out of an answer, or nowhere")


def widths(columns: Columns, draft_sizes: Sequence[int]) -> tuple[int, ...]:
    """What all shards must share: the hidden size, and of each draft size how many candidates, scored how."""
    drafts = [(columns[f"draft{size}.log_probs"].shape[-1], f"draft{size}.first" in columns) for size in draft_sizes]
    return columns["prefill.hidden"].shape[1], *(2 * count + is_paired for count, is_paired in drafts)
