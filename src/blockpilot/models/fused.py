"""Target and drafters on a GPU: what `decoder.py`, `dflash.py` and `eagle3.py` compute, in a third of the kernels.

A pass has a fixed shape (requests, tokens per request) and reads everything else from a `PassInputs`: that is what lets
it be captured as a CUDA graph. Nothing here decides anything; the layers are walked and the kernels called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from blockpilot.models.decoder import MLP, Attention, Decoder, DecoderLayer, MoE, RMSNorm, Rotary
from blockpilot.models.dflash import BlockConvolution, DFlash, DraftLayer
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.gpu import fused_kernels
from blockpilot.models.kernels_reference import Convolution, Kernels, Parts


@dataclass(frozen=True)
class PassInputs:
    """What a pass reads, on the device, all int32: R requests of n tokens each, N = R * n."""

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [R]
    starts: Tensor  # [R] rows already in the slot
    masks: Tensor  # [N, words] which of the request's n new rows a token sees, a bit each
    context: int = 2048  # the longest slot the pass is made for; longer ones are read too, only less well spread

    @property
    def num_requests(self) -> int:
        return len(self.slots)

    @property
    def count(self) -> int:
        return len(self.token_ids) // len(self.slots)


class FusedLayers:
    """What the layers of one model share: its cache, its rotation table, the device."""

    def __init__(self, rows: Tensor, rotary: Rotary, num_heads: int) -> None:
        """`rows` [layers, 2, slots, Hkv, capacity, D] is the model's cache; positions stay below its capacity."""
        self.rows, self.num_heads = rows, num_heads
        self.device, self.dtype = rows.device, rows.dtype
        self.kernels: Kernels = fused_kernels(rows.device)
        positions = torch.arange(rows.shape[4], dtype=torch.float32, device=self.device)
        angles = positions[:, None] * rotary.inverse_frequencies.to(self.device)
        self.table = (angles.cos(), angles.sin())  # [capacity, D/2], float32
        self.num_processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 4
        )

    def linear(self, x: Tensor, weight: Tensor) -> Parts:
        return self.kernels.linear(x, weight, self.num_processors)

    def whole(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in one piece."""
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        return self.kernels.linear(x, weight, self.num_processors, out=out).values

    def attention(self, attention: Attention, x: Tensor, inputs: PassInputs) -> Parts:
        """Everything between the norm and the residual addition; the cache gets the new rows."""
        return self.attend(attention, self.linear(x, attention.qkv_proj.weight), inputs)

    def attend(self, attention: Attention, qkv: Parts, inputs: PassInputs) -> Parts:
        keys = self.rows[attention.index, 0]
        num_kv, dim = keys.shape[1], keys.shape[3]
        num_queries = inputs.count * self.num_heads // num_kv  # of a request and a key head
        splits = self.kernels.choose_splits(
            inputs.num_requests, num_kv, num_queries, dim, self.num_processors, inputs.context
        )
        mixed = self.kernels.rotate_attend(
            qkv, inputs.positions, self.table, *_head_norms(attention), keys, self.rows[attention.index, 1],
            inputs.slots, inputs.starts, inputs.masks, self.num_heads, self.dtype, splits, inputs.context,
        )  # fmt: skip
        return self.linear(mixed, attention.o_proj.weight)

    def store(self, attention: Attention, x: Tensor, positions: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Keys and values of new rows into the cache."""
        self.kernels.rotate_store(
            self.linear(x, attention.qkv_proj.weight), positions, self.table, *_head_norms(attention),
            self.rows[attention.index, 0], self.rows[attention.index, 1], slots, starts, self.num_heads, self.dtype,
        )  # fmt: skip

    def mlp(self, mlp: MLP, x: Tensor) -> Parts:
        gated = self.kernels.gated_linear(x, mlp.gate_up_proj.weight, self.num_processors)
        return self.linear(gated, mlp.down_proj.weight)

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return self.kernels.add_norm(x, None, norm.weight, norm.eps)[1]

    def add_norm(
        self, x: Tensor, delta: Parts | None, norm: RMSNorm, convolution: Convolution | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(x, delta, norm.weight, norm.eps, convolution)


def _head_norms(attention: Attention) -> tuple[tuple[Tensor, Tensor] | None, float]:
    if attention.q_norm is None or attention.k_norm is None:
        return None, 0.0
    return (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps


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
        x, delta = fused.kernels.embed(inputs.token_ids, decoder.embed_tokens.weight), None
        after: dict[int, Tensor] = {}  # outputs of the layers that are read
        for index, layer in enumerate(cast(DecoderLayer, layer) for layer in decoder.layers):
            norm, weight = layer.input_layernorm, layer.self_attn.qkv_proj.weight
            x, qkv = fused.kernels.norm_linear(x, delta, norm.weight, norm.eps, weight, fused.num_processors)
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
        fused, norm = self.layers, layer.post_attention_layernorm
        if isinstance(layer.mlp, MLP):
            weight = layer.mlp.gate_up_proj.weight
            x, gated = fused.kernels.norm_gated_linear(x, delta, norm.weight, norm.eps, weight, fused.num_processors)
            return x, fused.linear(gated, layer.mlp.down_proj.weight)
        moe = cast(MoE, layer.mlp)
        return fused.kernels.norm_routed_mlp(
            x, delta, norm.weight, norm.eps, moe.gate.weight, *self.experts[layer.self_attn.index], moe.num_active,
            moe.is_normalized, fused.num_processors,
        )  # fmt: skip


def stack_experts(moe: MoE) -> tuple[Tensor, Tensor]:
    """The experts' weights as two tensors, [experts, 2 * F, H] and [experts, H, F]; the experts become their views."""
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
    return stacked[0], stacked[1]


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
        self.key_norms, self.key_eps = torch.stack([norm.weight.detach() for norm in norms]), norms[0].eps

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
        fused.kernels.store_context(
            projected, positions, fused.table, self.key_norms, self.key_eps, fused.rows, slots, starts
        )

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
