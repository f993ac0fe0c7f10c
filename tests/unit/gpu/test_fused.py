"""Weights of routed experts, stacked for the kernels."""

import torch

from blockpilot.gpu.fused import stack_experts
from blockpilot.models.config import MoeConfig
from blockpilot.models.decoder import MoE


def test_experts_are_stacked_once():
    torch.manual_seed(0)
    moe = MoE(8, MoeConfig(num_experts=3, num_active=2, intermediate_size=4, is_normalized=True))
    x = torch.randn(5, 8)
    before = moe(x)
    stacked = stack_experts(moe)
    again = stack_experts(moe)  # a second engine on the same weights
    for one, other in ((stacked.gate_up, again.gate_up), (stacked.down, again.down)):
        assert one.shape[0] == 3
        assert one.data_ptr() == other.data_ptr()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(moe(x), before)


def test_experts_that_were_moved_are_stacked_anew():
    moe = MoE(8, MoeConfig(num_experts=3, num_active=2, intermediate_size=4, is_normalized=True))
    stack_experts(moe)
    wide = stack_experts(moe.double())
    assert wide.gate_up.dtype == torch.float64
    assert torch.equal(wide.gate_up[1], moe.experts[1].gate_up_proj.weight)
