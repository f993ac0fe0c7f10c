"""DFlash training as the trainer runs it: blocks from texts, labels, loss and held-out evaluation."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.training.blocks import Blocks, sample_blocks
from blockpilot.training.dflash_objective import DFlashObjectiveConfig, dflash_loss, mixed_precision, read_taps
from blockpilot.training.evaluation import evaluate_dflash, head_rows
from blockpilot.training.loss_terms import LossTerms
from blockpilot.training.responses import ResponseSet


class DFlashTraining:
    """The objective that the trainer runs."""

    def __init__(
        self,
        model: DFlash,
        decoder: Decoder,
        config: DFlashObjectiveConfig,
        *,
        num_blocks: int,
        min_block_size: int,
        is_compiled: bool,
        held_out: ResponseSet | None,
        width: int,
    ) -> None:
        """`min_block_size` below the drafter's block size trains mixed sizes together."""
        self.model, self.decoder, self.config = model, decoder, config
        self.num_blocks, self.min_block_size, self.width = num_blocks, min_block_size, width
        self.held_out = held_out
        self.head = head_rows(model, decoder).detach()
        self.row_of = _row_table(model, decoder.config.vocab_size, self.head.device)
        self._loss = torch.compile(dflash_loss) if is_compiled else dflash_loss
        self._read_taps = torch.compile(read_taps) if is_compiled else read_taps

    @property
    def num_random(self) -> int:
        return 2 * self.num_blocks  # an anchor and a size each

    def loss(self, ids: Tensor, lengths: Tensor, prompt_lengths: Tensor, uniform: Tensor) -> LossTerms:
        blocks = sample_blocks(
            ids,
            lengths,
            prompt_lengths,
            uniform=uniform.view(len(ids), self.num_blocks, 2),
            full_size=self.model.config.block_size,
            min_size=self.min_block_size,
        )
        hidden, taps = self._read_taps(self.decoder, ids, self.model.config.tap_layers)
        labels = self._labels(ids, hidden, blocks)
        with mixed_precision(self.decoder):
            return self._loss(
                self.model,
                self.head,
                taps,
                ids,
                blocks,
                embed=self.decoder.embed_tokens,
                labels=labels,
                config=self.config,
            )

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        with mixed_precision(self.decoder):
            report = evaluate_dflash(
                self.model, self.decoder, self.held_out, block_size=self.model.config.block_size, width=self.width
            )
        return asdict(report)

    def _labels(self, ids: Tensor, hidden: Tensor, blocks: Blocks) -> Tensor:
        """Rows of the head that blocks must choose: the text's own tokens, or the target's choice at each place."""
        labels = blocks.labels
        if self.config.labels == "argmax":
            with torch.no_grad():
                said = self.decoder.logits(hidden).argmax(-1).view(ids.shape)  # after position t comes said[t]
            steps = torch.arange(blocks.full_size - 1, device=ids.device)
            places = (blocks.anchors[..., None] + steps).clamp(max=ids.shape[1] - 1)
            labels = said[:, None].expand(-1, places.shape[1], -1).gather(2, places)
        return labels if self.row_of is None else self.row_of[labels]


def _row_table(model: DFlash, vocab_size: int, device: torch.device) -> Tensor | None:
    """Token id -> row of the reduced head, -1 where it has none."""
    if model.draft_token_ids is None:
        return None
    rows = torch.full((vocab_size,), -1, dtype=torch.int64)
    rows[model.draft_token_ids.cpu()] = torch.arange(len(model.draft_token_ids))
    model.draft_token_ids = model.draft_token_ids.to(device)
    return rows.to(device)
