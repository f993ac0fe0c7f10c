"""What a DFlash drafter learns: the text behind an anchor, from the taps before it.

Position k of a block matters only if all earlier ones were right, so its loss is weighted:

    exponential   exp(-(k - 1) / gamma)
    d-pace        the gradient of the expected accepted length: suffix sums of the running product of
                  (1 - a) q + a, with q the probability now given to the right token

DFlash 2 adds a K-way loss: among the head's best candidates, the selector must pick the right one given the true token
before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.training.blocks import Blocks, sample_blocks
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.objective import DrafterTraining, LossTerms
from blockpilot.training.responses import ResponseSet, TextBatch
from blockpilot.training.text_passes import TargetEnds, draft_hidden, mixed_precision

_PACE_FLOOR = 0.5  # `a` of d-pace


class DFlashTraining(DrafterTraining):
    model: DFlash

    def __init__(self, model: DFlash, decoder: Decoder, run: DrafterRun, held_out: ResponseSet | None = None) -> None:
        """`run.min_block_size` below the drafter's block size trains mixed sizes together."""
        super().__init__(model, decoder, run, held_out)
        self.num_random = 2 * run.blocks  # an anchor and a size each
        self.ends = TargetEnds.of(model, decoder)
        self._loss = self._compiled(_dflash_loss)

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms:
        blocks = sample_blocks(
            texts,
            uniform=uniform.view(len(uniform), self.run.blocks, 2),
            full_size=self.block_size,
            min_size=self.run.min_block_size,
        )
        hidden, taps = self._read_taps(self.decoder, texts.ids, self.model.config.tap_layers)
        labels = self._labels(texts.ids, hidden, blocks)
        with mixed_precision(self.decoder):
            return self._loss(self.model, self.ends, taps, blocks, labels=labels, run=self.run)

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
    model: DFlash, ends: TargetEnds, taps: Tensor, blocks: Blocks, *, labels: Tensor, run: DrafterRun
) -> LossTerms:
    """The block's loss and, for DFlash 2, the selector's. `labels` are rows of the head, -1 where it has none."""
    hidden = draft_hidden(model, ends.embed, taps, blocks)[:, :, 1:]  # [B, A, D, H]
    logits = F.linear(hidden, ends.head).float()
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
