"""What a compiled pass reads: the layers of a model that has been packed, its rotation table, its cache.

The layers are those of `models/decoder.py` and `models/dflash.py`; nothing here knows an architecture. Whoever holds a
structure keeps the arrays that it points to.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import MLP, DecoderLayer, MoE, RMSNorm, Rotary
from blockpilot.models.dflash import BlockConvolution, DFlashConfig, DraftLayer
from blockpilot.models.packing import Int8Linear
from blockpilot.native.library import LayerData, ModelData, WeightData, address
from blockpilot.native.weights import GROUP, group_bytes


class PackedLayers:
    """`data` describes the layers to the kernels; `capacity` is the number of positions."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rotary: Rotary,
        config: DecoderConfig,
        capacity: int,
        convolution: DFlashConfig | None = None,
    ) -> None:
        self._kept: list[Any] = []
        cosines, sines = _rotation(rotary, capacity)
        moe = config.moe
        widths = [self._width(layer) for layer in layers]
        self._layers = (LayerData * len(layers))(*(self._describe(layer) for layer in layers))
        self.data = ModelData(
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv=config.num_kv_heads,
            dim=config.head_dim,
            inner=max(widths),
            num_experts=moe.num_experts if moe else 0,
            num_active=moe.num_active if moe else 0,
            is_normalized=bool(moe and moe.is_normalized),
            conv_taps=convolution.conv_kernel_size if convolution else 0,
            conv_group=convolution.conv_group_size if convolution else 1,
            eps=norm.eps,
            cosines=self._keep(cosines),
            sines=self._keep(sines),
            norm=self._keep(norm.weight),
            layers=self._layers,
        )

    def _keep(self, values: Any) -> int:
        """Where contiguous float32 numbers lie from now on."""
        if isinstance(values, Tensor):
            values = values.detach().to(torch.float32).contiguous()
        self._kept.append(values)
        return cast(int, address(values))

    def _describe(self, layer: DecoderLayer) -> LayerData:
        attention = layer.self_attn
        found = LayerData(
            input_norm=self._keep(layer.input_layernorm.weight),
            post_norm=self._keep(layer.post_attention_layernorm.weight),
            o=weight_of(attention.o_proj),
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            found.q_norm, found.k_norm = self._keep(attention.q_norm.weight), self._keep(attention.k_norm.weight)
        parts = _parts(attention.qkv_proj)
        found.num_qkv = len(parts)
        if (bias := cast(Int8Linear, attention.qkv_proj).bias) is not None:
            found.qkv_bias = self._keep(bias)
        for place, part in enumerate(parts):
            found.qkv[place] = part
        if isinstance(layer.mlp, MLP):
            found.gate_up[0], found.gate_up[1] = _halves(layer.mlp.gate_up_proj)
            found.down = weight_of(layer.mlp.down_proj)
        else:
            self._describe_experts(cast(MoE, layer.mlp), found)
        if isinstance(layer, DraftLayer) and layer.attention_conv is not None and layer.mlp_conv is not None:
            found.attention_base, found.attention_kernel = self._convolution(layer.attention_conv)
            found.mlp_base, found.mlp_kernel = self._convolution(layer.mlp_conv)
        return found

    def _describe_experts(self, moe: MoE, found: LayerData) -> None:
        experts = [cast(MLP, expert) for expert in moe.experts]
        pairs = [part for expert in experts for part in _halves(expert.gate_up_proj)]
        found.router = self._keep(moe.gate.weight)
        found.expert_gate_up = self._array(pairs)
        found.expert_down = self._array([weight_of(expert.down_proj) for expert in experts])

    def _array(self, weights: Sequence[WeightData]) -> Any:
        array = (WeightData * len(weights))(*weights)
        self._kept.append(array)
        return ctypes.cast(array, ctypes.POINTER(WeightData))

    def _convolution(self, convolution: BlockConvolution) -> tuple[int, WeightData]:
        return self._keep(convolution.base_kernel), weight_of(convolution.kernel_projection)

    def _width(self, layer: DecoderLayer) -> int:
        mlp = layer.mlp if isinstance(layer.mlp, MLP) else cast(MLP, cast(MoE, layer.mlp).experts[0])
        return int(cast(Int8Linear, mlp.down_proj).in_features)


def _rotation(rotary: Rotary, capacity: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(capacity, dtype=torch.float32)[:, None] * rotary.inverse_frequencies
    return angles.cos(), angles.sin()


def _parts(layer: nn.Module) -> list[WeightData]:
    return [part.info for part in cast(Int8Linear, layer).parts]


def _halves(layer: nn.Module) -> list[WeightData]:
    """The gate and the up projection; stored in one form they are one weight."""
    parts = _parts(layer)
    if len(parts) == 2:
        return parts
    whole, rows = parts[0], parts[0].rows // 2
    second = whole.data + rows // GROUP * group_bytes(whole)
    return [WeightData(rows, whole.size, whole.kind, whole.is_half, whole.stride, at) for at in (whole.data, second)]


def weight_of(layer: nn.Module) -> WeightData:
    """A weight of one part."""
    (part,) = _parts(layer)
    return part
