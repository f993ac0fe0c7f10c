"""What a DFlash drafter learns: the text behind an anchor, from the taps before it.

Position k of a block matters only if all earlier ones were right, so its loss is weighted:

    exponential   exp(-(k - 1) / gamma)
    d-pace        the gradient of the expected accepted length: suffix sums of the running product of
                  (1 - a) q + a, with q the probability now given to the right token

DFlash 2 adds a K-way loss: among the head's best candidates, the selector must pick the right one given the true token
before it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.training.blocks import Blocks, block_mask
from blockpilot.training.dense_attention import BlockAttention, CausalAttention
from blockpilot.training.loss_terms import LossTerms


@dataclass(frozen=True, kw_only=True)
class DFlashObjectiveConfig:
    position_weights: str = "exponential"  # or d-pace
    gamma: float = 7.0
    pace_floor: float = 0.5
    selector_weight: float = 1.0
    labels: str = "data"  # or argmax: the target's own choice after each true prefix


def mixed_precision(decoder: Decoder) -> AbstractContextManager[Any]:
    """bfloat16 passes over float32 weights, on every GPU and wherever the target itself is not in float32."""
    weight = decoder.embed_tokens.weight
    is_mixed = weight.device.type == "cuda" or weight.dtype != torch.float32
    return torch.autocast(weight.device.type, torch.bfloat16) if is_mixed else nullcontext()


def read_taps(decoder: Decoder, ids: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target over whole texts [B, T]: hidden states and taps, both [B * T, ...]."""
    batch_size, width = ids.shape
    positions = torch.arange(width, device=ids.device).repeat(batch_size)
    with torch.no_grad():
        hidden, taps = decoder(ids.flatten(), positions, CausalAttention(batch_size), tap_layers)
    assert taps is not None
    return hidden, taps


def draft_hidden(
    model: DFlash, taps: Tensor, blocks: Blocks, *, ids: Tensor, embed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Hidden states [B, A, full, H] of every block."""
    batch_size, width = ids.shape
    num_blocks, full = blocks.anchors.shape[1], blocks.full_size
    positions = torch.arange(width, device=ids.device).repeat(batch_size)
    projected = F.linear(model.context(taps), model.context_weight())
    attend = BlockAttention(block_mask(blocks, width), model.split_context(projected, positions))
    block_ids = torch.full((batch_size, num_blocks, full), model.config.mask_token_id, device=ids.device)
    block_ids[..., 0] = ids.gather(1, blocks.anchors)
    offsets = torch.arange(full, device=ids.device)
    block_positions = blocks.anchors[..., None] + offsets
    embeddings = embed(block_ids.flatten()).to(model.norm.weight.dtype)
    flat_offsets = offsets.repeat(batch_size * num_blocks)
    hidden = model(embeddings, block_positions.flatten(), attend, flat_offsets)
    return hidden.view(batch_size, num_blocks, full, -1)


def dflash_loss(
    model: DFlash,
    head_weight: Tensor,
    taps: Tensor,
    ids: Tensor,
    blocks: Blocks,
    *,
    embed: Callable[[Tensor], Tensor],
    labels: Tensor,
    config: DFlashObjectiveConfig,
) -> LossTerms:
    """The block's loss and, for DFlash 2, the selector's.

    `labels` index rows of `head_weight`; -1 where the reduced head has no such row.
    """
    hidden = draft_hidden(model, taps, blocks, ids=ids, embed=embed)[:, :, 1:]  # [B, A, D, H]
    logits = F.linear(hidden, head_weight).float()
    is_known = blocks.is_valid & (labels >= 0)
    target = labels.clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view(labels.shape)
    weights = position_weights(losses, is_known, config) * is_known
    sums, weight_sums = [(losses * weights).sum()], [weights.sum()]
    choices = logits.argmax(dim=-1)
    if model.candidate_selector is not None:
        pair_losses, is_found, choices = _selector_losses(model, hidden, logits, blocks, ids=ids, target=target)
        sums.append(config.selector_weight * (pair_losses * weights * is_found).sum())
        weight_sums.append((weights * is_found).sum())
    hits = ((choices == target) & is_known).float()
    metrics = {"emitted": 1 + hits.cumprod(dim=-1).sum(dim=-1).mean(), "first": hits[..., 0].mean()}
    return LossTerms(torch.stack(sums), torch.stack(weight_sums), metrics)


def position_weights(losses: Tensor, is_known: Tensor, config: DFlashObjectiveConfig) -> Tensor:
    """Weights [B, A, D] of the losses [B, A, D], without gradient."""
    if config.position_weights == "exponential":
        steps = torch.arange(losses.shape[-1], device=losses.device)
        return torch.exp(-steps / config.gamma).expand_as(losses)
    kept = (1 - config.pace_floor) * torch.exp(-losses.detach()) + config.pace_floor
    running = (kept * is_known).cumprod(dim=-1)
    return running.flip(-1).cumsum(dim=-1).flip(-1)


def _selector_losses(
    model: DFlash, hidden: Tensor, logits: Tensor, blocks: Blocks, *, ids: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """K-way losses among the head's best candidates, each given the true token before it; where the right one is among
    them; and the rows the selector picks. All [B, A, D]."""
    selector = model.candidate_selector
    assert selector is not None
    best = logits.topk(min(model.config.selector_top_k, logits.shape[-1]), dim=-1)  # [B, A, D, K]
    anchor_ids = ids.gather(1, blocks.anchors)[..., None]
    parents = torch.cat((anchor_ids, blocks.labels[..., :-1]), dim=-1)  # [B, A, D]
    rows = model.draft_token_ids
    children = best.indices if rows is None else rows[best.indices]
    scores = best.values + selector(parents[..., None], hidden, children)[..., 0, :].float()
    matches = best.indices == target[..., None]
    losses = F.cross_entropy(scores.flatten(0, 2), matches.float().argmax(dim=-1).flatten(), reduction="none")
    picks = best.indices.gather(-1, scores.argmax(dim=-1, keepdim=True))[..., 0]
    return losses.view(target.shape), matches.any(dim=-1), picks
