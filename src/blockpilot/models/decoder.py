"""The only causal decoder (Llama, Qwen2, Qwen3 and Qwen3-MoE, told apart by switches in its config) and its building
blocks, which the drafters share.

Tokens of all requests in a step lie packed along one axis of length N; linear layers do not know where one request
ends. Attention does, so it is passed in as a function: `attend(layer, q, k, v)` stores the new keys and values wherever
the caller keeps them and returns what the queries read. Models therefore know nothing of caches, batches or masks.

A pass of the decoder returns the final hidden states and, where a drafter asked for them, the outputs of chosen layers
("taps"); no other hidden state outlives its layer. Logits are a separate call, so that prefill pays the head for one
position and not for the whole prompt.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.models.config import DecoderConfig, MoeConfig, RopeConfig

# (layer index, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq * D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.RMSNorm):
    eps: float


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # values for nobody would import PyTorch's compiler, for more than a second
            super().reset_parameters()


class Rotary(nn.Module):
    """Rotary position embedding; cos and sin are computed once per pass and reused by every layer."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.register_buffer("inverse_frequencies", rope_frequencies(config, head_dim), persistent=False)
        self.inverse_frequencies: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Moves with its model and stays float32: at position 500 a rounded frequency is off by half a radian."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse_frequencies = rope_frequencies(self.config, self.head_dim).to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign they carry: minus for the first half of a head, plus for the second."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies  # [N, D/2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]  # [N, 1, D]


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """llama3: long wavelengths are stretched by `factor`, short ones kept, those between blended smoothly."""
    places = torch.arange(0, head_dim, 2, dtype=torch.float32, device=_real_device())
    frequencies = config.theta ** -(places / head_dim)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    rotations = config.original_context_length * frequencies / (2 * torch.pi)
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _real_device() -> torch.device:
    """Arithmetic on the meta device would import PyTorch's compiler, for more than a second."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def apply_rotary(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [N, H, D] by the half-split convention: pairs are (i, i + D/2)."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class Attention(nn.Module):
    """Projections around `attend`: fused q/k/v, optional biases and q/k norm, rotary, output."""

    def __init__(self, config: DecoderConfig, index: int, input_size: int | None = None) -> None:
        """`input_size` is the width of what is read, where that is not the hidden size (EAGLE-3 reads two vectors)."""
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(input_size or config.hidden_size, rows, bias=config.has_qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        if config.has_qk_norm:
            self.q_norm: RMSNorm | None = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm: RMSNorm | None = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.project(x, rotation)
        return self.o_proj(attend(self.index, q, k, v))

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, Hq, D], keys and values [N, Hkv, D], normalised and rotated."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [N, Hq + 2 Hkv, D]
        split = self.num_heads + self.num_kv_heads
        queries_keys, v = heads[:, :split], heads[:, split:]
        if self.q_norm is not None and self.k_norm is not None:
            parts = (self.q_norm(queries_keys[:, : self.num_heads]), self.k_norm(queries_keys[:, self.num_heads :]))
            queries_keys = torch.cat(parts, dim=1)
        queries_keys = apply_rotary(queries_keys, rotation)
        return queries_keys[:, : self.num_heads], queries_keys[:, self.num_heads :], v


class MLP(nn.Module):
    """SwiGLU with fused gate and up projections."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class MoE(nn.Module):
    """Routed experts: each token visits its `num_active` best; only experts that were chosen are touched."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self.num_active, self.is_normalized = config.num_active, config.is_normalized
        self.gate = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(hidden_size, config.intermediate_size) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = F.softmax(self.gate(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self.num_active, dim=-1)  # [N, A]
        if self.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.experts[expert](x[rows]) * weights[rows, ranks, None])
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module
        if config.moe is None or index in config.moe.dense_layers:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config.hidden_size, config.moe)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.head_dim)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, tap_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [N, H] before the final norm, and taps [N, len(tap_layers) * H] in the given order."""
        x = self.embed_tokens(token_ids)
        rotation = self.rotary(positions, x.dtype)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, attend)
            if index in tap_layers:
                kept[index] = x
        taps = torch.cat([kept[index] for index in tap_layers], dim=-1) if tap_layers else None
        return x, taps

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [N, V] of hidden states [N, H]."""
        return self.lm_head(self.norm(hidden))
