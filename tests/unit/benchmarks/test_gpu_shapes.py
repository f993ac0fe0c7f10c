"""The floor of a step with routed experts counts the experts that its tokens choose."""

from gpu_shapes import idle_bytes

from blockpilot.core.tree import DraftTree
from blockpilot.gpu.target import GpuTargetRunner
from tests.tiny import make_decoder, make_placement

NUM_ROUTED = 2  # layers; each token chooses two of four experts
EXPERT_BYTES = 3 * 32 * 24 * 4


def make_runner(architecture: str) -> GpuTargetRunner:
    decoder = make_decoder(architecture).requires_grad_(False)
    return GpuTargetRunner(decoder, make_placement(2, 64))


def test_a_token_reads_the_experts_it_chooses():
    runner = make_runner("qwen3_moe")
    slots = [runner.cache.reserve() for _ in range(2)]
    one = [(slots[0], DraftTree.chain(1, []))]
    same = [(slot, DraftTree.chain(1, [])) for slot in slots]
    many = [(slots[0], DraftTree.chain(0, list(range(1, 40))))]
    assert idle_bytes(runner, one) == NUM_ROUTED * 2 * EXPERT_BYTES
    assert idle_bytes(runner, same) == NUM_ROUTED * 2 * EXPERT_BYTES  # the same token twice: no more experts
    assert idle_bytes(runner, many) < NUM_ROUTED * EXPERT_BYTES


def test_without_experts_nothing_is_idle():
    runner = make_runner("qwen3")
    assert idle_bytes(runner, [(runner.cache.reserve(), DraftTree.chain(1, []))]) == 0
