"""Target and drafters on a GPU: what `decoder.py`, `dflash.py` and `eagle3.py` compute, in a third of the kernels.

A pass has a fixed shape (requests, tokens per request) and reads everything else from a `PassInputs`: that is what lets
it be captured as a CUDA graph. Nothing here decides anything; the layers are walked and the kernels called.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockpilot.gpu.interface import (
    AttentionLayer,
    ContextLayers,
    Convolution,
    Experts,
    Kernels,
    Norm,
    Parts,
    PassInputs,
    Rope,
    find_kernels,
)
from blockpilot.models.decoder import MLP, Attention, Decoder, DecoderLayer, MoE, RMSNorm, Rotary
from blockpilot.models.dflash import BlockConvolution, DFlash, DraftLayer
from blockpilot.models.eagle3 import Eagle3


class FusedLayers:
    """What the layers of one model share: its cache, its rotation table, the device."""

    def __init__(self, rows: Tensor, rotary: Rotary, num_heads: int) -> None:
        """`rows` [layers, 2, slots, Hkv, capacity, D] is the model's cache; positions stay below its capacity."""
        self.rows, self.num_heads = rows, num_heads
        self.device, self.dtype = rows.device, rows.dtype
        self.kernels: Kernels = find_kernels(rows.device)
        positions = torch.arange(rows.shape[4], dtype=torch.float32, device=self.device)
        angles = positions[:, None] * rotary.inverse_frequencies.to(self.device)
        self.rope = Rope(angles.cos(), angles.sin())

    def linear(self, x: Tensor, weight: Tensor) -> Parts:
        return self.kernels.linear(x, weight)

    def whole(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in one piece."""
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        return self.kernels.linear(x, weight, out=out).values

    def attention(self, attention: Attention, x: Tensor, inputs: PassInputs) -> Parts:
        """Everything between the norm and the residual addition; the cache gets the new rows."""
        return self.attend(attention, self.linear(x, attention.qkv_proj.weight), inputs)

    def attend(self, attention: Attention, qkv: Parts, inputs: PassInputs) -> Parts:
        mixed = self.kernels.rotate_attend(qkv, self._layer(attention), inputs)
        return self.linear(mixed, attention.o_proj.weight)

    def store(self, attention: Attention, x: Tensor, positions: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Keys and values of new rows into the cache."""
        qkv = self.linear(x, attention.qkv_proj.weight)
        self.kernels.rotate_store(qkv, self._layer(attention), positions, slots, starts)

    def _layer(self, attention: Attention) -> AttentionLayer:
        keys, values = self.rows[attention.index]
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = _norm(attention.q_norm), _norm(attention.k_norm)
        return AttentionLayer(keys, values, self.rope, norms, self.num_heads, attention.qkv_proj.bias)

    def mlp(self, mlp: MLP, x: Tensor) -> Parts:
        gated = self.kernels.gated_linear(x, mlp.gate_up_proj.weight)
        return self.linear(gated, mlp.down_proj.weight)

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return self.kernels.add_norm(x, None, _norm(norm))[1]

    def add_norm(
        self, x: Tensor, delta: Parts | None, norm: RMSNorm, convolution: Convolution | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(x, delta, _norm(norm), convolution)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


class FusedDecoder:
    def __init__(self, decoder: Decoder, rows: Tensor) -> None:
        self.decoder = decoder
        self.layers = FusedLayers(rows, decoder.rotary, decoder.config.num_heads)
        self.experts = {  # by layer
            index: stack_experts(layer.mlp) for index, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MoE)
        }

    def forward(
        self, inputs: PassInputs, tap_layers: Sequence[int], taps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] before and after the final norm; `taps` [N, layers * H] gets what `Decoder` gives."""
        fused, decoder = self.layers, self.decoder
        inputs = fused.kernels.lay_out(inputs)
        x, delta = fused.kernels.embed(inputs.token_ids, decoder.embed_tokens.weight), None
        after: dict[int, Tensor] = {}  # outputs of the layers that are read
        for index, layer in enumerate(cast(DecoderLayer, layer) for layer in decoder.layers):
            norm, weight = _norm(layer.input_layernorm), layer.self_attn.qkv_proj.weight
            x, qkv = fused.kernels.norm_linear(x, delta, norm, weight)
            if index - 1 in tap_layers:
                after[index - 1] = x
            delta = fused.attend(layer.self_attn, qkv, inputs)  # what experts left before is freed
            x, delta = self._mlp(layer, x, delta)
        x, normed = fused.add_norm(x, delta, decoder.norm)
        if taps is not None:
            after[len(decoder.layers) - 1] = x
            torch.cat([after[index] for index in tap_layers], dim=-1, out=taps)
        return x, normed

    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        return self.layers.whole(normed, self.decoder.lm_head.weight, out)

    def _mlp(self, layer: DecoderLayer, x: Tensor, delta: Parts) -> tuple[Tensor, Parts]:
        """What comes before the second sublayer, x + delta, and what the sublayer adds to it."""
        fused, norm = self.layers, _norm(layer.post_attention_layernorm)
        if isinstance(layer.mlp, MLP):
            weight = layer.mlp.gate_up_proj.weight
            x, gated = fused.kernels.norm_gated_linear(x, delta, norm, weight)
            return x, fused.linear(gated, layer.mlp.down_proj.weight)
        experts = self.experts[layer.self_attn.index]
        return fused.kernels.norm_routed_mlp(x, delta, norm, experts)


def stack_experts(moe: MoE) -> Experts:
    """The experts' weights as two tensors; the experts become their views."""
    experts = [cast(MLP, expert) for expert in moe.experts]
    stacked = []
    for name in ("gate_up_proj", "down_proj"):
        parts = [getattr(expert, name).weight.detach() for expert in experts]
        weights = _find_stack(parts)
        if weights is None:
            weights = torch.stack(parts)
            for expert, weight in zip(experts, weights, strict=True):
                getattr(expert, name).weight = nn.Parameter(weight, requires_grad=False)
        stacked.append(weights)
    return Experts(moe.gate.weight, stacked[0], stacked[1], moe.num_active, moe.is_normalized)


def _find_stack(parts: Sequence[Tensor]) -> Tensor | None:
    """What the parts are views of, where an earlier engine has stacked them: no second copy of the experts."""
    first, size = parts[0], parts[0].numel()
    owner, start = first.untyped_storage().data_ptr(), first.storage_offset()
    places = [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    if places != [(owner, start + index * size) for index in range(len(parts))]:
        return None
    return first.as_strided((len(parts), *first.shape), (size, *first.stride()), start)


class FusedDFlash:
    def __init__(self, model: DFlash, rows: Tensor) -> None:
        self.model = model
        self.layers = FusedLayers(rows, model.rotary, model.config.layers.num_heads)
        norms = [cast(RMSNorm, cast(DraftLayer, layer).self_attn.k_norm) for layer in model.layers]
        key_norms = Norm(torch.stack([norm.weight.detach() for norm in norms]), norms[0].eps)
        self.context = ContextLayers(rows, self.layers.rope, key_norms)

    def forward(self, table: Tensor, inputs: PassInputs, offsets: Tensor) -> Tensor:
        """Normalised hidden states [N, H] of blocks; `table` embeds tokens, `offsets` is their place in the block."""
        fused, model = self.layers, self.model
        layers = [cast(DraftLayer, layer) for layer in model.layers]
        x = fused.kernels.embed(inputs.token_ids, table)
        normed = fused.norm(layers[0].input_layernorm, x)
        for index, layer in enumerate(layers):
            around = self._convolution(layer.attention_conv, normed, offsets)
            read = normed if around is None else fused.kernels.convolve(normed, around)
            attended = fused.attention(layer.self_attn, read, inputs)
            x, normed = fused.add_norm(x, attended, layer.post_attention_layernorm, around)
            around = self._convolution(layer.mlp_conv, normed, offsets)
            read = normed if around is None else fused.kernels.convolve(normed, around)
            after = layers[index + 1].input_layernorm if index + 1 < len(layers) else model.norm
            x, normed = fused.add_norm(x, fused.mlp(layer.mlp, read), after, around)
        return normed

    def store_context(
        self, taps: Tensor, context_weight: Tensor, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> None:
        """Keys and values of committed tokens into the cache; `context_weight` is the model's."""
        fused, model = self.layers, self.model
        features = fused.norm(model.hidden_norm, fused.whole(taps, model.fc.weight))
        projected = fused.linear(features, context_weight)
        fused.kernels.store_context(projected, self.context, positions, slots, starts)

    def _convolution(self, conv: BlockConvolution | None, x: Tensor, offsets: Tensor) -> Convolution | None:
        if conv is None:
            return None
        corrections = self.layers.whole(x, conv.kernel_projection.weight)
        return Convolution(conv.base_kernel, corrections, offsets, conv.group_size)


class FusedEagle3:
    def __init__(self, model: Eagle3, rows: Tensor) -> None:
        self.model = model
        self.layers = FusedLayers(rows, model.rotary, model.config.layers.num_heads)

    def forward(self, embeddings: Tensor, hidden: Tensor, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        """Outputs [N, H] of pairs, which the next pairs continue, and the same after the final norm."""
        fused, layer = self.layers, self.model.midlayer
        pairs, normed = self._join(embeddings, hidden)
        x = normed if layer.is_residual_normed else hidden
        x, normed = fused.add_norm(x, fused.attention(layer.self_attn, pairs, inputs), layer.post_attention_layernorm)
        return fused.add_norm(x, fused.mlp(layer.mlp, normed), self.model.norm)

    def logits(self, normed: Tensor) -> Tensor:
        return self.layers.whole(normed, self.model.lm_head.weight)

    def fuse(self, taps: Tensor) -> Tensor:
        return self.layers.whole(taps, self.model.fc.weight)

    def store_context(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> None:
        """Keys and values of committed pairs into the cache."""
        pairs, _ = self._join(embeddings, hidden)
        self.layers.store(self.model.midlayer.self_attn, pairs, positions, slots, starts)

    def _join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [N, 2H], and its second half, the normed hidden states.

        Attention loads old rows while the kernel before it runs. In a chain of passes the pass before wrote some of
        them; this concatenation, which starts when everything before it has ended, keeps the two apart.
        """
        layer = self.model.midlayer
        normed = self.layers.norm(layer.hidden_norm, hidden)
        return torch.cat((self.layers.norm(layer.input_layernorm, embeddings), normed), dim=-1), normed
