"""DFlash and DFlash 2: diffusion drafters that propose a whole block in one pass.

The drafter reads the target's taps. `context` projects the taps of committed tokens to features, and each layer's keys
and values of those features are cached like any others. A block is the anchor's embedding followed by mask embeddings;
its tokens see the whole context and each other, and the target's own head turns their hidden states into candidates.

DFlash 2 adds two small parts, present or not by the checkpoint: a two-tap dynamic convolution around every sublayer,
and a selector that scores a candidate given the one before it.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import MLP, Attend, Attention, DecoderLayer, RMSNorm, Rotary, apply_rotary


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    layers: DecoderConfig  # shapes of the draft layers; architecture qwen3
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]  # 0-based target layers whose outputs are read
    num_target_layers: int | None  # None: the checkpoint does not say
    conv_kernel_size: int = 0  # 0: plain DFlash, no convolutions
    conv_group_size: int = 16
    selector_rank: int = 0  # 0: no selector
    selector_top_k: int = 16


class BlockConvolution(nn.Module):
    """Two-tap grouped dynamic convolution along the block, before and after one sublayer.

    out[i, c] = sum over t of (base[t, c] + delta[i, t, group(c)]) * x[i - t, c], with nothing before the block's start.
    One projection of the sublayer's input yields the deltas of both sides. Starts as the identity.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size, self.group_size = kernel_size, group_size
        base = torch.zeros(2, kernel_size, hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def deltas(self, x: Tensor) -> Tensor:
        """Per-token kernel corrections [2 sides, N, taps, groups] from the normalised sublayer input [N, H]."""
        return self.kernel_projection(x).view(x.shape[0], 2, self.kernel_size, -1).transpose(0, 1)

    def apply_side(self, side: int, x: Tensor, deltas: Tensor, offsets: Tensor) -> Tensor:
        return convolve_block(x, self.base_kernel[side], deltas[side], offsets)


def convolve_block(x: Tensor, base: Tensor, deltas: Tensor, offsets: Tensor) -> Tensor:
    """x [N, H] under the kernel `base` [taps, H] with each token's corrections `deltas` [N, taps, groups].

    `offsets` [N] counts each token's place in its block, so that no tap reaches over the block's start.
    """
    grouped = x.view(x.shape[0], deltas.shape[2], -1)  # [N, groups, channels]
    base = base.view(len(base), *grouped.shape[1:])
    out = (base[0] + deltas[:, 0, :, None]) * grouped
    for tap in range(1, len(base)):
        shifted = F.pad(grouped, (0, 0, 0, 0, tap, 0))[: grouped.shape[0]]
        shifted = shifted * (offsets >= tap)[:, None, None]
        out = out + (base[tap] + deltas[:, tap, :, None]) * shifted
    return out.reshape(x.shape)


class DraftLayer(DecoderLayer):
    mlp: MLP

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__(config.layers, index)
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None
        if config.conv_kernel_size:
            shape = (config.layers.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv, self.mlp_conv = BlockConvolution(*shape), BlockConvolution(*shape)

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, offsets: Tensor
    ) -> Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(x, rotation, attend)
        normed = self.input_layernorm(x)
        deltas = self.attention_conv.deltas(normed)
        attended = self.self_attn(self.attention_conv.apply_side(0, normed, deltas, offsets), rotation, attend)
        x = x + self.attention_conv.apply_side(1, attended, deltas, offsets)
        normed = self.post_attention_layernorm(x)
        deltas = self.mlp_conv.deltas(normed)
        mixed = self.mlp(self.mlp_conv.apply_side(0, normed, deltas, offsets))
        return x + self.mlp_conv.apply_side(1, mixed, deltas, offsets)


class CandidateSelector(nn.Module):
    """Scores child b after parent a at position t: U_t(b) + <A(a) * H(h_t), B(b)>."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        if not self.predecessor_codebook.is_meta:
            nn.init.normal_(self.predecessor_codebook, std=rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, parent_ids: Tensor, hidden: Tensor, child_ids: Tensor) -> Tensor:
        """Pairwise scores [..., P, K] of parents [..., P] and children [..., K] at positions with hidden [..., H]."""
        gated = self.predecessor_codebook[parent_ids] * self.hidden_projection(hidden).unsqueeze(-2)  # [..., P, rank]
        return gated @ self.successor_codebook[child_ids].transpose(-1, -2)


class DFlash(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        shapes = config.layers
        self.fc = nn.Linear(len(config.tap_layers) * shapes.hidden_size, shapes.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(shapes.num_layers))
        self.norm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.rotary = Rotary(shapes.rope, shapes.head_dim)
        self.candidate_selector: CandidateSelector | None = None
        self.draft_token_ids: Tensor | None = None  # rows of the target's head to look at; None: all
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(shapes.vocab_size, config.selector_rank, shapes.hidden_size)

    def context(self, taps: Tensor) -> Tensor:
        """Context features [N, H] of committed tokens' taps [N, num_taps * H]."""
        return self.hidden_norm(self.fc(taps))

    def context_weight(self) -> Tensor:
        """Key and value rows of all layers [layers * 2 * Hkv * D, H]: context features feed every layer alike."""
        shapes = self.config.layers
        first = shapes.num_heads * shapes.head_dim
        return torch.cat([attention.qkv_proj.weight[first:] for attention in self._attentions()])

    def split_context(self, projected: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer, normalised and rotated keys and values [N, Hkv, D] of `context_weight` applied to features."""
        shapes = self.config.layers
        heads = projected.view(len(projected), shapes.num_layers, 2, shapes.num_kv_heads, shapes.head_dim)
        rotation = self.rotary(positions, self.norm.weight.dtype)  # full precision where training runs in mixed
        return [
            (apply_rotary(cast(RMSNorm, attention.k_norm)(heads[:, index, 0]), rotation), heads[:, index, 1])
            for index, attention in enumerate(self._attentions())
        ]

    def _attentions(self) -> list[Attention]:
        return [cast(DraftLayer, layer).self_attn for layer in self.layers]

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend, offsets: Tensor) -> Tensor:
        """Normalised hidden states [N, H] of packed blocks; `offsets` is each token's place in its block."""
        x = embeddings
        rotation = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend, offsets)
        return self.norm(x)
