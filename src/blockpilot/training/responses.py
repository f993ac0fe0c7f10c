"""Training text on disk: prompts with their answers, as token ids, in shards.

A folder holds `shard-00000.safetensors`, ... and `manifest.json`. A shard stores all ids back to back with each text's
total length and prompt length, so a million texts cost three tensors. Shards are written whole or not at all; a run
that is interrupted goes on behind the last one.
"""

import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.core.columns import Promise, read_columns
from blockpilot.core.errors import InputError
from blockpilot.core.files import write_bytes
from blockpilot.core.manifests import TEXTS, read_manifest
from blockpilot.core.reading import convert

MAX_SHARD_BYTES = 2**32
MAX_TOKEN_ID = 2**31 - 1
_COLUMNS = ("token_ids", "lengths", "prompt_lengths", "sources")
_ADVICE = "delete it and run `blockpilot synthesize` again"
Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Response:
    token_ids: list[int]  # prompt and answer
    num_prompt_tokens: int
    source: int = 0  # what it was written for: its number among the manifest's `sources`


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, responses: Iterable[Response]) -> None:
    from safetensors.torch import save

    texts = ResponseSet.from_responses(responses)
    is_small = not len(texts.token_ids) or int(texts.token_ids.max()) <= 65535
    tensors = {
        "token_ids": texts.token_ids.to(torch.uint16 if is_small else torch.int32),
        "lengths": texts.lengths.int(),
        "prompt_lengths": texts.prompt_lengths.int(),
        "sources": texts.sources.int(),
    }
    write_bytes(path, save(tensors))


def read_responses(folder: Path) -> "ResponseSet":
    """All texts of all shards."""
    manifest = read_manifest(folder, TEXTS) or {}
    shards = sorted(folder.glob("shard-*.safetensors"))
    if not shards:
        raise InputError(f"{folder} holds no training text: run `blockpilot synthesize --out {folder}` first")
    parts = [_read_shard(path) for path in shards]
    names = manifest.get("sources", [])
    token_ids, lengths, prompt_lengths, sources = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ResponseSet(token_ids, lengths, prompt_lengths, sources, names=convert(names, tuple[str, ...], str(folder)))


def _read_shard(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, lengths, prompt lengths and sources."""
    if not os.path.isfile(path):
        raise InputError(f"{path} is no file: {_ADVICE}")
    columns, _ = read_columns(path, _check_promises, most=MAX_SHARD_BYTES, advice=_ADVICE)
    token_ids, lengths, prompt_lengths, sources = (columns[name] for name in _COLUMNS)
    if not _are_sound(len(token_ids), lengths, prompt_lengths):
        raise InputError(f"{path} is damaged: its lengths do not add up; {_ADVICE}")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() <= MAX_TOKEN_ID:
        raise InputError(f"{path} is damaged: it holds token ids that no tokenizer gives; {_ADVICE}")
    rest = [torch.from_numpy(column).long() for column in (lengths, prompt_lengths, sources)]
    return torch.from_numpy(token_ids).int(), rest[0], rest[1], rest[2]


def _check_promises(promises: Mapping[str, Promise], _: Mapping[str, str]) -> None:
    if odd := sorted(promises.keys() ^ set(_COLUMNS)):
        raise ValueError(f"its column {odd[0]!r:.80} is {'left over' if odd[0] in promises else 'missing'}")
    for name, found in promises.items():
        if len(found.shape) != 1 or found.is_float:
            raise ValueError(f"its column {name!r} is no list of whole numbers")
    for name in ("prompt_lengths", "sources"):
        if promises["lengths"].shape != promises[name].shape:
            raise ValueError(f"its lengths are not as many as its {name.replace('_', ' ')}")


def _are_sound(num_tokens: int, lengths: Integers, prompt_lengths: Integers) -> bool:
    """No text is longer than all of them, prompts have a token and are no longer than their texts."""
    if not len(lengths):
        return not num_tokens
    if lengths.min() < 1 or lengths.max() > num_tokens or prompt_lengths.min() < 1:
        return False
    return int(lengths.sum(dtype=np.int64)) == num_tokens and bool((prompt_lengths <= lengths).all())


class TextBatch(NamedTuple):
    """Some texts as a padded grid."""

    ids: Tensor  # [B, width], zeros behind the end
    lengths: Tensor  # [B], cut at the width
    prompt_lengths: Tensor  # [B], cut at the width

    def to(self, device: torch.device) -> "TextBatch":
        return TextBatch(*(x.to(device) for x in self))


class ResponseSet:
    """All texts in memory."""

    def __init__(
        self,
        token_ids: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        sources: Tensor,
        *,
        names: tuple[str, ...] = (),
    ) -> None:
        self.token_ids, self.lengths, self.prompt_lengths, self.sources = token_ids, lengths, prompt_lengths, sources
        self.names = names  # of the sources
        self.starts = self.lengths.cumsum(0) - self.lengths

    @classmethod
    def from_responses(cls, responses: Iterable[Response]) -> "ResponseSet":
        rows = list(responses)
        flat = torch.tensor([token_id for row in rows for token_id in row.token_ids], dtype=torch.int32)
        lengths = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64)
        prompt_lengths = torch.tensor([row.num_prompt_tokens for row in rows], dtype=torch.int64)
        return cls(flat, lengths, prompt_lengths, torch.tensor([row.source for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens that the target does not know: its embeddings are looked up by them."""
        if len(self.token_ids) and (largest := int(self.token_ids.max())) >= vocab_size:
            raise InputError(
                f"the training text holds token {largest}, and this target knows {vocab_size} tokens: another model "
                "wrote it; run `blockpilot synthesize` with this target"
            )

    def slice(self, first: int, end: int) -> "ResponseSet":
        """Texts `first` to `end`, without copying them."""
        rows = slice(first, end)
        start = int(self.lengths[:first].sum())
        place = slice(start, start + int(self.lengths[rows].sum()))
        columns = (column[rows] for column in (self.lengths, self.prompt_lengths, self.sources))
        return ResponseSet(self.token_ids[place], *columns, names=self.names)

    def source_name(self, index: int) -> str:
        """What a text was written for."""
        number = int(self.sources[index])
        return self.names[number] if 0 <= number < len(self.names) else str(number)

    def count_answer_tokens(self, vocab_size: int) -> Tensor:
        """How often answers use each token [V]."""
        places = torch.arange(len(self.token_ids)) - self.starts.repeat_interleave(self.lengths)
        is_answer = places >= self.prompt_lengths.repeat_interleave(self.lengths)
        return torch.bincount(self.token_ids[is_answer], minlength=vocab_size)

    def answer_ids(self, index: int, width: int) -> list[int]:
        """The answer of one text, cut where the text passes `width`."""
        start, end = int(self.prompt_lengths[index]), int(self.lengths[index].clamp(max=width))
        place = int(self.starts[index])
        return self.token_ids[place + start : place + end].tolist()

    def batch(self, indices: Tensor, width: int) -> TextBatch:
        offsets = torch.arange(width)
        lengths = self.lengths[indices].clamp(max=width)
        places = (self.starts[indices][:, None] + offsets).clamp(max=len(self.token_ids) - 1)
        ids = self.token_ids[places].long().masked_fill(offsets >= lengths[:, None], 0)
        return TextBatch(ids, lengths, self.prompt_lengths[indices].clamp(max=width))
