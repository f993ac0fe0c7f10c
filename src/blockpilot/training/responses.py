"""Training text on disk: prompts with their answers, as token ids, in shards.

A folder holds `shard-00000.safetensors`, ... and `manifest.json`. A shard stores all ids back to back with each text's
total length and prompt length, so a million texts cost three tensors. Shards are written whole or not at all; a run
that is interrupted goes on behind the last one.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, ensure_folder, write_text

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Response:
    token_ids: list[int]  # prompt and answer
    num_prompt_tokens: int


class ResponseFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = ensure_folder(folder)

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def read_manifest(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.is_file():
            return None
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path} is not readable JSON: {error}; move the folder away and start anew") from error
        if manifest.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"{path}: schema version {manifest.get('schema_version')}, this program reads {SCHEMA_VERSION}"
            )
        return manifest

    def write_manifest(self, content: dict[str, Any]) -> None:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2) + "\n"
        write_text(self.folder / MANIFEST, text)

    def write_shard(self, index: int, responses: Sequence[Response]) -> None:
        from safetensors.torch import save_file

        flat = [token_id for response in responses for token_id in response.token_ids]
        tensors = {
            "token_ids": torch.tensor(flat, dtype=torch.int32 if max(flat, default=0) > 65535 else torch.uint16),
            "lengths": torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int32),
            "prompt_lengths": torch.tensor([response.num_prompt_tokens for response in responses], dtype=torch.int32),
        }
        with atomic_path(self.folder / f"shard-{index:05d}.safetensors") as path:
            save_file(tensors, str(path))

    def read(self) -> "ResponseSet":
        from safetensors.torch import load_file

        if not self.shards:
            raise InputError(
                f"{self.folder} holds no training text: run `blockpilot synthesize --out {self.folder}` first"
            )
        parts = [{key: value.long() for key, value in load_file(str(path)).items()} for path in self.shards]
        return ResponseSet(
            *(torch.cat([part[key] for part in parts]) for key in ("token_ids", "lengths", "prompt_lengths"))
        )


class ResponseSet:
    """All texts in memory; batches are padded grids."""

    def __init__(self, token_ids: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> None:
        self.token_ids, self.lengths, self.prompt_lengths = token_ids, lengths, prompt_lengths
        self.starts = self.lengths.cumsum(0) - self.lengths

    @classmethod
    def from_responses(cls, responses: Iterable[Response]) -> "ResponseSet":
        rows = list(responses)
        flat = torch.tensor([token_id for row in rows for token_id in row.token_ids])
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        return cls(flat, lengths, torch.tensor([row.num_prompt_tokens for row in rows]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def subset(self, indices: Tensor) -> "ResponseSet":
        rows = [
            Response(
                self.token_ids[self.starts[i] : self.starts[i] + self.lengths[i]].tolist(), int(self.prompt_lengths[i])
            )
            for i in indices.tolist()
        ]
        return ResponseSet.from_responses(rows)

    def answer_ids(self, index: int, width: int) -> list[int]:
        """The answer of one text, cut where the text passes `width`."""
        start, end = int(self.prompt_lengths[index]), int(self.lengths[index].clamp(max=width))
        place = int(self.starts[index])
        return self.token_ids[place + start : place + end].tolist()

    def batch(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, width] padded with 0, and each row's length and prompt length, both cut at `width`."""
        offsets = torch.arange(width)
        lengths = self.lengths[indices].clamp(max=width)
        places = (self.starts[indices][:, None] + offsets).clamp(max=len(self.token_ids) - 1)
        ids = self.token_ids[places].masked_fill(offsets >= lengths[:, None], 0)
        return ids, lengths, self.prompt_lengths[indices].clamp(max=width)
