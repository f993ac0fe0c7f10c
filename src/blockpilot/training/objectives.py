"""What drafters learn: how a batch of texts turns into a loss, and a drafter's tau on held-out texts.

DFlash learns the text behind an anchor from the taps before it. Position k of a block matters only if all earlier ones
were right, so its loss is weighted:

    exponential   exp(-(k - 1) / gamma)
    d-pace        the gradient of the expected accepted length: suffix sums of the running product of
                  (1 - a) q + a, with q the probability now given to the right token

DFlash 2 adds a K-way loss: among the head's best candidates, the selector must pick the right one given the true token
before it.

EAGLE-3 learns to continue the target's hidden states by itself ("training-time test"). Chains start at every position
and are unrolled for a few steps (`unroll` in `text_passes.py`). From the second step on the head reads its own outputs,
so that errors it will make when drafting are errors it trains on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.evaluation import evaluate_drafter
from blockpilot.training.responses import ResponseSet, TextBatch
from blockpilot.training.text_passes import (
    Blocks,
    draft_hidden,
    head_rows,
    head_weight,
    mixed_precision,
    read_taps,
    sample_blocks,
    unroll,
)

_PACE_FLOOR = 0.5  # `a` of d-pace
STEP_DECAY = 0.8  # loss weight of each further step that EAGLE-3 unrolls


class LossTerms(NamedTuple):
    """A loss before it is divided: the sum over terms of `sums / weights`, each counted over all processes."""

    sums: Tensor  # [terms]
    weights: Tensor  # [terms], without gradient
    metrics: dict[str, Tensor]


class DrafterTraining(ABC):
    """A drafter, the frozen target it learns from, and how a batch of texts turns into a loss."""

    model: DFlash | Eagle3
    block_size: int  # that is evaluated
    num_random = 0  # random numbers wanted per block

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

    @abstractmethod
    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms: ...

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        with mixed_precision(self.decoder):
            report = evaluate_drafter(
                self.model, self.decoder, self.held_out, block_size=self.block_size, width=self.run.longest
            )
        return asdict(report)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # widths are few: a program for each is faster than one for all
        return torch.compile(function, dynamic=False) if self.run.is_compiled else function


class DFlashTraining(DrafterTraining):
    model: DFlash
    num_random = 2  # an anchor and a size

    def __init__(self, model: DFlash, decoder: Decoder, run: DrafterRun, held_out: ResponseSet | None = None) -> None:
        """`run.min_block_size` below the drafter's block size trains mixed sizes together."""
        super().__init__(model, decoder, run, held_out)
        self.block_size = model.config.block_size
        self.head = head_weight(model, decoder)
        self._loss = self._compiled(_dflash_loss)

    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms:
        blocks = sample_blocks(
            texts,
            uniform=uniform.view(len(uniform), -1, 2),
            full_size=self.block_size,
            min_size=self.run.min_block_size,
        )
        hidden, taps = self._read_taps(self.decoder, texts.ids, self.model.config.tap_layers)
        labels = self._labels(texts.ids, hidden, blocks)
        with mixed_precision(self.decoder):
            return self._loss(self.model, self.decoder, taps, blocks, head=self.head, labels=labels, run=self.run)

    def _labels(self, ids: Tensor, hidden: Tensor, blocks: Blocks) -> Tensor:
        """Rows of the head that blocks must choose: the text's own tokens, or the target's choice at each place."""
        labels = blocks.labels
        if self.run.labels == "argmax":
            with torch.no_grad():
                said = self.decoder.logits(hidden).argmax(-1).view(ids.shape)  # after position t comes said[t]
            steps = torch.arange(blocks.full_size - 1, device=ids.device)
            places = (blocks.anchors[..., None] + steps).clamp(max=ids.shape[1] - 1)
            labels = said[:, None].expand(-1, places.shape[1], -1).gather(2, places)
        return labels if self.row_of is None else self.row_of[labels]


def _dflash_loss(
    model: DFlash, decoder: Decoder, taps: Tensor, blocks: Blocks, *, head: Tensor, labels: Tensor, run: DrafterRun
) -> LossTerms:
    """The block's loss and, for DFlash 2, the selector's. `labels` are rows of the head, -1 where it has none."""
    hidden = draft_hidden(model, decoder, taps, blocks)[:, :, 1:]  # [B, A, D, H]
    logits = F.linear(hidden, head).float()
    is_known = blocks.is_valid & (labels >= 0)
    target = labels.clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view(labels.shape)
    weights = position_weights(losses, is_known, run) * is_known
    sums, weight_sums = [(losses * weights).sum()], [weights.sum()]
    choices = logits.argmax(dim=-1)
    if model.candidate_selector is not None:
        pair_losses, is_found, choices = _selector_losses(model, hidden, logits, blocks, target)
        sums.append((pair_losses * weights * is_found).sum())
        weight_sums.append((weights * is_found).sum())
    hits = ((choices == target) & is_known).float()
    metrics = {"emitted": 1 + hits.cumprod(dim=-1).sum(dim=-1).mean(), "first": hits[..., 0].mean()}
    return LossTerms(torch.stack(sums), torch.stack(weight_sums), metrics)


def position_weights(losses: Tensor, is_known: Tensor, run: DrafterRun) -> Tensor:
    """Weights [B, A, D] of the losses [B, A, D], without gradient."""
    if run.position_weights == "exponential":
        steps = torch.arange(losses.shape[-1], device=losses.device)
        return torch.exp(-steps / run.gamma).expand_as(losses)
    return pace_weights(losses, is_known)


def pace_weights(losses: Tensor, is_known: Tensor, *, floor: float = _PACE_FLOOR) -> Tensor:
    kept = (1 - floor) * torch.exp(-losses.detach()) + floor
    running = (kept * is_known).cumprod(dim=-1)
    return running.flip(-1).cumsum(dim=-1).flip(-1)


def _selector_losses(
    model: DFlash, hidden: Tensor, logits: Tensor, blocks: Blocks, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """K-way losses among the head's best candidates, each given the true token before it; where the right one is among
    them; and the rows the selector picks. All [B, A, D]."""
    selector = model.candidate_selector
    assert selector is not None
    best = logits.topk(min(model.config.selector_top_k, logits.shape[-1]), dim=-1)  # [B, A, D, K]
    parents = torch.cat((blocks.anchor_ids[..., None], blocks.labels[..., :-1]), dim=-1)  # [B, A, D]
    rows = model.draft_token_ids
    children = best.indices if rows is None else rows[best.indices]
    scores = best.values + selector(parents[..., None], hidden, children)[..., 0, :].float()
    matches = best.indices == target[..., None]
    losses = F.cross_entropy(scores.flatten(0, 2), matches.float().argmax(dim=-1).flatten(), reduction="none")
    picks = best.indices.gather(-1, scores.argmax(dim=-1, keepdim=True))[..., 0]
    return losses.view(target.shape), matches.any(dim=-1), picks


class Eagle3Training(DrafterTraining):
    """Draws no random numbers: every position of every text is a start."""

    model: Eagle3
    row_of: Tensor

    def __init__(self, model: Eagle3, decoder: Decoder, run: DrafterRun, held_out: ResponseSet | None = None) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass died under these masks (PyTorch 2.11, H200)
        super().__init__(model, decoder, run, held_out)
        model.lm_head.weight.data.copy_(decoder.lm_head.weight[model.draft_token_ids])  # start from the target's rows
        self.block_size = run.unrolled + 1
        self._loss = self._compiled(eagle3_loss)

    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms:
        _, taps = self._read_taps(self.decoder, texts.ids, self.model.config.tap_layers)
        labels = self.row_of[texts.ids]
        with mixed_precision(self.decoder):
            return self._loss(self.model, self.decoder, taps, texts, labels=labels, num_steps=self.run.unrolled)


def eagle3_loss(
    model: Eagle3, decoder: Decoder, taps: Tensor, texts: TextBatch, *, labels: Tensor, num_steps: int
) -> LossTerms:
    """Cross-entropy, one term per unrolled step; `labels` [B, T] are head rows, -1 where the head has none."""
    starts, ends = texts.prompt_lengths[:, None], texts.lengths[:, None]
    rows = torch.arange(texts.ids.shape[1] - 1, device=texts.ids.device)
    target = F.pad(labels[:, 2:], (0, 1), value=-1)  # row i -> token i + 2
    decay_sum = sum(STEP_DECAY**step for step in range(num_steps))
    sums, weights, hits = [], [], []
    for step, logits in enumerate(unroll(model, decoder, taps, texts.ids, num_steps=num_steps)):
        is_known = (rows - step + 1 >= starts) & (rows + 2 < ends) & (target >= 0)
        losses = F.cross_entropy(logits.float().flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        sums.append(STEP_DECAY**step / decay_sum * (losses.view(target.shape) * is_known).sum())
        weights.append(is_known.sum().float())
        hits.append(((logits.argmax(-1) == target) & is_known).roll(-step, dims=1))
    is_inside = (rows + 1 >= starts) & (rows + num_steps + 1 < ends)  # starts of chains that fit into their answer
    count = is_inside.sum().clamp(min=1)
    accepted = torch.stack(hits, -1).float().cumprod(-1).sum(-1)  # [B, T - 1] by starting row
    metrics = {"emitted": 1 + (accepted * is_inside).sum() / count, "first": (hits[0] & is_inside).sum() / count}
    return LossTerms(torch.stack(sums), torch.stack(weights), metrics)
