"""The floor of a step with routed experts counts the experts that its tokens choose."""

import torch
from gpu_step import idle_bytes, weight_bytes

from blockpilot.core.tree import DraftTree
from blockpilot.engine.planned_runner import PlannedRunner
from blockpilot.models.config import DecoderConfig, MoeConfig, RopeConfig
from blockpilot.models.decoder import Decoder


def make_runner(moe: MoeConfig | None) -> PlannedRunner:
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="qwen3" if moe is None else "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        context_length=128,
        rope=RopeConfig(theta=1e4),
        is_tied=False,
        moe=moe,
    )
    decoder = Decoder(config).eval().requires_grad_(False)
    return PlannedRunner(decoder, num_slots=2, context_length=64, device=torch.device("cpu"), dtype=torch.float32)


def test_a_token_reads_the_experts_it_chooses():
    runner = make_runner(MoeConfig(num_experts=8, num_active=2, intermediate_size=24, is_normalized=True))
    expert = 3 * 32 * 24 * 4
    slots = [runner.cache.reserve() for _ in range(2)]
    assert idle_bytes(runner, [(slots[0], DraftTree.chain(1, []))]) == 2 * 6 * expert
    same = [(slot, DraftTree.chain(1, [])) for slot in slots]
    assert idle_bytes(runner, same) == 2 * 6 * expert  # the same token twice: no more experts
    many = [(slots[0], DraftTree.chain(0, list(range(1, 40))))]
    assert 0 <= idle_bytes(runner, many) < 2 * 2 * expert


def test_without_experts_nothing_is_idle():
    runner = make_runner(None)
    assert idle_bytes(runner, [(runner.cache.reserve(), DraftTree.chain(1, []))]) == 0
    assert weight_bytes(runner.decoder) > 0
