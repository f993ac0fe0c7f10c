"""What the trainer asks of every kind of drafter: a loss of a batch of texts, and an evaluation on held-out ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.evaluation import evaluate_drafter
from blockpilot.training.responses import ResponseSet, TextBatch
from blockpilot.training.text_passes import head_rows, mixed_precision, read_taps


class LossTerms(NamedTuple):
    """A loss before it is divided: the sum over terms of `sums / weights`, each counted over all processes."""

    sums: Tensor  # [terms]
    weights: Tensor  # [terms], without gradient
    metrics: dict[str, Tensor]


class DrafterTraining(ABC):
    """A drafter, the frozen target it learns from, and how a batch of texts turns into a loss."""

    model: DFlash | Eagle3
    num_random = 0  # random numbers wanted per text and step

    def __init__(
        self, model: DFlash | Eagle3, decoder: Decoder, run: DrafterRun, held_out: ResponseSet | None = None
    ) -> None:
        self.model, self.decoder, self.run, self.held_out = model, decoder, run, held_out
        self.device = decoder.embed_tokens.weight.device
        self.row_of: Tensor | None = None  # token id -> row of the drafter's head, -1 where it has none
        if model.draft_token_ids is not None:
            model.draft_token_ids = model.draft_token_ids.to(self.device)
            self.row_of = head_rows(model.draft_token_ids, decoder.config.vocab_size)
        self._read_taps = self._compiled(read_taps)

    @property
    @abstractmethod
    def block_size(self) -> int:
        """The block size that is evaluated."""

    @abstractmethod
    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms: ...

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        with mixed_precision(self.decoder):
            report = evaluate_drafter(
                self.model, self.decoder, self.held_out, block_size=self.block_size, width=self.run.width
            )
        return asdict(report)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function) if self.run.is_compiled else function
