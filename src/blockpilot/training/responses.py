"""Training text on disk: prompts with their answers, as token ids, in shards.

A folder holds `shard-00000.safetensors`, ... and `manifest.json`. A shard stores all ids back to back with each text's
total length and prompt length, so a million texts cost three tensors. Shards are written whole or not at all; a run
that is interrupted goes on behind the last one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path


@dataclass(frozen=True)
class Response:
    token_ids: list[int]  # prompt and answer
    num_prompt_tokens: int


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, responses: Iterable[Response]) -> None:
    from safetensors.torch import save_file

    texts = ResponseSet.from_responses(responses)
    is_small = not len(texts.token_ids) or int(texts.token_ids.max()) <= 65535
    tensors = {
        "token_ids": texts.token_ids.to(torch.uint16 if is_small else torch.int32),
        "lengths": texts.lengths.int(),
        "prompt_lengths": texts.prompt_lengths.int(),
    }
    with atomic_path(path) as temporary:
        save_file(tensors, str(temporary))


def read_responses(folder: Path) -> "ResponseSet":
    """All texts of all shards."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    if not shards:
        raise InputError(f"{folder} holds no training text: run `blockpilot synthesize --out {folder}` first")
    parts = [_read_shard(path) for path in shards]
    return ResponseSet(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _read_shard(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, lengths and prompt lengths."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    advice = "delete it and run `blockpilot synthesize` again"
    try:
        tensors = load_file(str(path))
        token_ids, lengths, prompt_lengths = (tensors[key] for key in ("token_ids", "lengths", "prompt_lengths"))
        is_sound = int(lengths.sum()) == len(token_ids) and bool((prompt_lengths <= lengths).all())
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is damaged: {advice}") from error
    if not is_sound:
        raise InputError(f"{path} is damaged: its lengths do not add up; {advice}")
    return token_ids.int(), lengths.long(), prompt_lengths.long()


class TextBatch(NamedTuple):
    """Some texts as a padded grid."""

    ids: Tensor  # [B, width], zeros behind the end
    lengths: Tensor  # [B], cut at the width
    prompt_lengths: Tensor  # [B], cut at the width

    def to(self, device: torch.device) -> "TextBatch":
        return TextBatch(*(x.to(device) for x in self))


class ResponseSet:
    """All texts in memory."""

    def __init__(self, token_ids: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> None:
        self.token_ids, self.lengths, self.prompt_lengths = token_ids, lengths, prompt_lengths
        self.starts = self.lengths.cumsum(0) - self.lengths

    @classmethod
    def from_responses(cls, responses: Iterable[Response]) -> "ResponseSet":
        rows = list(responses)
        flat = torch.tensor([token_id for row in rows for token_id in row.token_ids], dtype=torch.int32)
        lengths = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64)
        return cls(flat, lengths, torch.tensor([row.num_prompt_tokens for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def slice(self, first: int, end: int) -> "ResponseSet":
        """Texts `first` to `end`, without copying them."""
        rows = slice(first, end)
        start = int(self.lengths[:first].sum())
        place = slice(start, start + int(self.lengths[rows].sum()))
        return ResponseSet(self.token_ids[place], self.lengths[rows], self.prompt_lengths[rows])

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
