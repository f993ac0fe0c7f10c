"""Blocks to learn from: random anchors inside answers, and what each block may see.

Everything is static in shape, so that the training step compiles once. A block shorter than the full size is the same
tensor with its tail hidden: that is how mixed block sizes train together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.training.responses import TextBatch


@dataclass(frozen=True)
class Blocks:
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
