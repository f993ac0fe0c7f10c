"""Speculative decoding on a GPU emits what plain decoding emits, through graphs and kernels, in every precision."""

from dataclasses import replace

import pytest

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.gpu.target import GpuTargetRunner
from tests.tiny import RandomTreePilot, make_dflash, make_eagle3, make_llm

pytestmark = pytest.mark.gpu
PROMPTS = ["abcabcab", "the quick brown fox", "z", "hello hello hello"]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.8, 0), (0.8, 20)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_method_gives_the_plain_text(dtype: str, name: str, temperature: float, top_k: int) -> None:
    """Where one request filters tokens the host decides for all; else the device decides alone where it can.

    In float32 the text is also that of a CPU; with fewer bits it is the GPU's own, one request at a time."""
    params = [
        SamplingParams(max_new_tokens=24 + i, temperature=temperature, seed=i + 2**35, top_k=top_k * (i == 2))
        for i in range(4)
    ]
    plain = make_llm(name) if dtype == "float32" else make_llm(name, device="cuda", dtype=dtype, num_slots=1)
    expected = [answer.token_ids for answer in plain.generate(PROMPTS, params, is_raw=True)]
    for drafter in (make_dflash(name), make_dflash(name, is_second=True), make_eagle3(name)):
        llm = make_llm(name, drafter=drafter, device="cuda", dtype=dtype)
        assert isinstance(llm.engine.runner, GpuTargetRunner)
        for pilot in ("ar", "fixed:4", "fixed:8", "tree:15", "tree:63"):
            found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
            assert [answer.token_ids for answer in found] == expected, (pilot, type(drafter).__name__)
        pilots = [RandomTreePilot(seed) for seed in range(4)]
        found = llm.generate(PROMPTS, params, pilot=pilots, is_raw=True)
        assert [answer.token_ids for answer in found] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_of_their_own_give_the_plain_text(dtype: str) -> None:
    sizes = (14, 15, 16, 17, 18)
    llm = make_llm("qwen2", drafter=make_dflash("qwen2"), device="cuda", dtype=dtype, own_shapes=sizes)
    params = [SamplingParams(max_new_tokens=40 + i, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    for prompts in (PROMPTS[:1], PROMPTS):
        expected = [answer.token_ids for answer in llm.generate(prompts, params[: len(prompts)], is_raw=True)]
        for size in sizes:
            found = llm.generate(prompts, params[: len(prompts)], pilot=f"fixed:{size}", is_raw=True)
            assert [answer.token_ids for answer in found] == expected, size
    assert isinstance(llm.engine.runner, GpuTargetRunner) and {*sizes} <= {key[1] for key in llm.engine.runner._passes}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_those_of_the_cpu(temperature: float) -> None:
    """Graphs are replayed for many steps while other memory comes and goes: what they read must still be there."""
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5)
    steps = []
    for device, is_host in (("cpu", True), ("cuda", True), ("cuda", False)):
        llm = make_llm("qwen3", drafter=make_dflash("qwen3", is_second=True), device=device)
        loop = llm.engine.pipeline.loop
        llm.engine.pipeline.loop = replace(loop, executors=loop.executors[-1:]) if is_host else loop
        answers = llm.generate(PROMPTS, params, pilot="tree:15", is_raw=True)
        steps.append([[step.emitted for step in answer.steps] for answer in answers])
    assert steps[0] == steps[1]
    num_steps = [sum(map(len, taken)) for taken in steps]
    assert num_steps[2] == pytest.approx(num_steps[0], rel=0.1)  # nodes of nearly equal paths may change places
