"""Passes over whole texts, for training and evaluation: the target's taps, DFlash blocks, EAGLE-3 chains.

Finished texts are known from end to end, so one pass of each model serves all their positions. `attend` follows the
contract of the engine's passes (`models/decoder.py`); the functions for it stand in `dense_attention.py`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.dense_attention import BlockAttention, CausalAttention, UnrollAttention
from blockpilot.training.responses import TextBatch


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


@dataclass(frozen=True)
class Blocks:
    """Blocks to learn from, or to judge by: anchors inside answers.

    Everything is static in shape, so that the training step compiles once. A block shorter than the full size is the
    same tensor with its tail hidden: that is how mixed block sizes train together.
    """

    anchors: Tensor  # [B, A] position of each block's anchor
    anchor_ids: Tensor  # [B, A] the token there
    sizes: Tensor  # [B, A] block size, 2 .. full
    labels: Tensor  # [B, A, full - 1] the text's own tokens behind the anchor
    is_valid: Tensor  # [B, A, full - 1] inside the text and inside the block

    @property
    def full_size(self) -> int:
        return self.labels.shape[-1] + 1


def sample_blocks(texts: TextBatch, *, uniform: Tensor, full_size: int, min_size: int) -> Blocks:
    """Anchors uniform over each answer, sizes uniform from `min_size` to `full_size`.

    `uniform` [B, A, 2] holds the random numbers in [0, 1): for each block one for its anchor and one for its size.
    """
    # from the first answer token to the last but one, behind which there is something to draft
    room = (texts.lengths - 1 - texts.prompt_lengths).clamp(min=1)[:, None]
    anchors = texts.prompt_lengths[:, None] + (uniform[..., 0] * room).long()
    sizes = min_size + (uniform[..., 1] * (full_size - min_size + 1)).long()
    return make_blocks(texts, anchors=anchors.clamp(max=texts.ids.shape[1] - 1), sizes=sizes, full_size=full_size)


def make_blocks(texts: TextBatch, *, anchors: Tensor, sizes: Tensor, full_size: int) -> Blocks:
    """Blocks at chosen anchors [B, A], with their labels."""
    ids = texts.ids
    steps = torch.arange(1, full_size, device=ids.device)
    places = anchors[..., None] + steps  # [B, A, full - 1]
    labels = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, places.clamp(max=ids.shape[1] - 1))
    is_valid = (places < texts.lengths[:, None, None]) & (steps < sizes[..., None])
    return Blocks(anchors, ids.gather(1, anchors), sizes, labels, is_valid)


def block_mask(blocks: Blocks, width: int) -> Tensor:
    """[B, A * full, width + A * full]: context strictly before the anchor, and the block's own visible tokens."""
    num_blocks = blocks.anchors.shape[1]
    full, device = blocks.full_size, blocks.anchors.device
    anchors = blocks.anchors.repeat_interleave(full, dim=1)  # [B, A * full]
    context = torch.arange(width, device=device) < anchors[..., None]
    owner = torch.arange(num_blocks, device=device).repeat_interleave(full)
    offset = torch.arange(full, device=device).repeat(num_blocks)
    visible = offset < blocks.sizes.repeat_interleave(full, dim=1)  # [B, A * full], as keys
    own = (owner[:, None] == owner) & visible[:, None]
    own = own | torch.eye(num_blocks * full, dtype=torch.bool, device=device)  # hidden queries must see something
    return torch.cat((context, own), dim=-1)


def draft_hidden(model: DFlash, decoder: Decoder, taps: Tensor, blocks: Blocks) -> Tensor:
    """Hidden states [B, A, full, H] of every block, from the taps [B * T, ...] of the texts."""
    batch_size, num_blocks = blocks.anchors.shape
    full, device, width = blocks.full_size, taps.device, len(taps) // batch_size
    positions = torch.arange(width, device=device).repeat(batch_size)
    projected = F.linear(model.context(taps), model.context_weight())
    attend = BlockAttention(block_mask(blocks, width), model.split_context(projected, positions))
    block_ids = torch.full((batch_size, num_blocks, full), model.config.mask_token_id, device=device)
    block_ids[..., 0] = blocks.anchor_ids
    offsets = torch.arange(full, device=device)
    block_positions = blocks.anchors[..., None] + offsets
    embeddings = decoder.embed_tokens(block_ids.flatten()).to(model.norm.weight.dtype)
    hidden = model(embeddings, block_positions.flatten(), attend, offsets.repeat(batch_size * num_blocks))
    return hidden.view(batch_size, num_blocks, full, -1)


def unroll(model: Eagle3, decoder: Decoder, taps: Tensor, ids: Tensor, *, num_steps: int) -> list[Tensor]:
    """Logits of every step of all chains, each [B, T - 1, draft vocab]: row i predicts token i + 2.

    Step 0 reads the target's fused taps, one pair per position. Step s reads its own outputs of step s - 1, shifted by
    one: row i of step s is the s-th pair of the chain that started at row i - s.
    """
    batch_size, width = ids.shape
    fused = model.fuse(taps).view(batch_size, width, -1)[:, :-1]
    embed = decoder.embed_tokens if model.embed_tokens is None else model.embed_tokens
    embeddings = embed(ids[:, 1:].flatten()).to(model.norm.weight.dtype)
    positions = torch.arange(width - 1, device=ids.device).repeat(batch_size)
    attend, hidden, found = UnrollAttention(batch_size), fused, []
    for _ in range(num_steps):
        outputs = model(embeddings, hidden.flatten(0, 1), positions, attend)
        found.append(model.logits(outputs).view(batch_size, width - 1, -1))
        hidden = F.pad(outputs.view(batch_size, width - 1, -1)[:, :-1], (0, 0, 1, 0))
    return found


def head_weight(model: DFlash, decoder: Decoder) -> Tensor:
    """The rows of the target's head [rows, H] that a DFlash drafter looks at: it has no head of its own."""
    weight, rows = decoder.lm_head.weight.detach(), model.draft_token_ids
    return weight if rows is None else weight[rows.to(weight.device)]


def head_rows(draft_token_ids: Tensor, vocab_size: int) -> Tensor:
    """For every id of the target [V], the row of a reduced head, or -1 where it has none: training labels."""
    rows = torch.full((vocab_size,), -1, device=draft_token_ids.device)
    rows[draft_token_ids] = torch.arange(len(draft_token_ids), device=rows.device)
    return rows
