"""Layers against plain loops, and taps in the order they were asked for."""

import pytest
import torch

from blockpilot.gpu.fused import FusedLayers
from blockpilot.models.config import MoeConfig
from blockpilot.models.decoder import MoE, rope_frequencies
from tests.support import causal_attend
from tests.tiny import ARCHITECTURES, make_decoder


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("num_active", [1, 2, 5])
@torch.inference_mode()
def test_moe_equals_a_loop_over_tokens_and_experts(num_active: int, is_normalized: bool) -> None:
    torch.manual_seed(0)
    config = MoeConfig(num_experts=5, num_active=num_active, intermediate_size=12, is_normalized=is_normalized)
    moe = MoE(16, config)
    x = torch.randn(9, 16)
    rows = []
    for token in x:
        shares = torch.softmax(moe.gate(token), dim=0)
        chosen = sorted(range(5), key=lambda expert: -float(shares[expert]))[:num_active]
        total = sum(shares[expert] for expert in chosen) if is_normalized else 1.0
        rows.append(sum(shares[expert] / total * moe.experts[expert](token[None])[0] for expert in chosen))
    torch.testing.assert_close(moe(x), torch.stack(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_taps_are_layer_outputs_in_the_order_asked_for(architecture: str) -> None:
    decoder = make_decoder(architecture)
    ids, positions = torch.arange(3, 11), torch.arange(8)
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: outputs.__setitem__(index, out))
    for order in [(0,), (2, 0), (1, 2, 0), (1, 1)]:
        hidden, taps = decoder(ids, positions, causal_attend, order)
        assert taps is not None
        assert torch.equal(taps, torch.cat([outputs[index] for index in order], dim=-1))
        assert torch.equal(hidden, outputs[2])


def test_no_taps_asked_for_none_returned() -> None:
    hidden, taps = make_decoder()(torch.arange(4), torch.arange(4), causal_attend)
    assert taps is None
    assert hidden.shape == (4, 32)


def test_rotation_stays_exact_in_half_precision() -> None:
    """Frequencies or angles in bfloat16 would turn position 500 by half a radian too much."""
    decoder = make_decoder("llama").to(torch.bfloat16)
    rope, dim = decoder.config.rope, decoder.config.head_dim
    angles = torch.arange(600, dtype=torch.float64)[:, None] * rope_frequencies(rope, dim).double()
    cos, sin = decoder.rotary(torch.arange(600), torch.float32)
    torch.testing.assert_close(cos[:, 0, : dim // 2].double(), angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin[:, 0, dim // 2 :].double(), angles.sin(), rtol=0, atol=1e-4)
    rows = torch.zeros(1, 2, 1, 1, 600, dim, dtype=torch.bfloat16)
    fused = FusedLayers(rows, decoder.rotary, decoder.config.num_heads)
    torch.testing.assert_close(fused.rope[0].double(), angles.cos(), rtol=0, atol=1e-4)
