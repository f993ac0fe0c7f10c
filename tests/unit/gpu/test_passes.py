"""Passes of fixed shape give what unrecorded passes give. Here with the kernels' reference implementation, on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.engine.llm import LLM
from blockpilot.gpu import device as gpu
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.target import GpuTargetRunner
from tests.tiny import RandomTreePilot, make_dflash, make_eagle3, make_llm
from tests.unit.gpu.late_device import make_gpu_llm

PROMPTS = ["abcabcab", "the quick brown fox", "z", "hello hello hello"]
PILOTS = ["ar", "fixed:4", "tree:15", "tree:70"]


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_recorded_passes_decode_as_unrecorded_ones_do(name: str, is_second: bool) -> None:
    plain = make_llm(name, drafter=make_dflash(name, is_second=is_second))
    planned = make_gpu_llm(name, with_device_steps=False, drafter=make_dflash(name, is_second=is_second))
    assert isinstance(planned.engine.runner, GpuTargetRunner) and isinstance(planned.drafter, GpuDFlashDrafter)
    params = SamplingParams(max_new_tokens=30)
    for pilot in PILOTS:
        expected = plain.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        found = planned.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        for ours, theirs in zip(found, expected, strict=True):  # the same drafts were accepted, not only the same text
            assert [step.emitted for step in ours.steps] == [step.emitted for step in theirs.steps]


def test_sampling_and_mixed_requests() -> None:
    plain = make_llm("qwen3", drafter=make_dflash("qwen3", is_second=True))
    planned = make_gpu_llm("qwen3", drafter=make_dflash("qwen3", is_second=True))
    params = [
        SamplingParams(max_new_tokens=20 + 3 * i, temperature=0.7 * (i % 2), seed=i, top_k=20 * (i == 3))
        for i in range(4)
    ]

    def answers(llm: LLM) -> list[tuple[list[int], list[int]]]:
        pilots = [RandomTreePilot(seed) for seed in range(4)]
        found = llm.generate(PROMPTS, params, pilot=pilots, is_raw=True)
        return [(answer.token_ids, [step.emitted for step in answer.steps]) for answer in found]

    assert answers(planned) == answers(plain)


@pytest.mark.parametrize("lengths", [(1, 2), (5, 2), (128, 2), (129, 2), (2, 210), (144, 160), (3, 200, 140, 7, 129)])
@pytest.mark.parametrize("make_drafter", [make_dflash, make_eagle3])
def test_prompts_run_in_pieces(make_drafter: Callable[[str], Any], lengths: tuple[int, ...]) -> None:
    """Logits, hidden states and first tokens of prompts, the first behind old rows; what the drafter has stored."""
    params = [SamplingParams(), SamplingParams(temperature=0.9, seed=7), *[SamplingParams()] * 3][: len(lengths)]
    results, caches = [], []
    for make in (make_llm, make_gpu_llm):
        engine = make("qwen3", drafter=make_drafter("qwen3"), num_slots=5).engine
        runner, drafter = engine.runner, engine.drafter
        slots = [runner.cache.reserve() for _ in lengths]
        runner.prefill([(slots[0], [3, 4, 5])], drafter.tap_layers, show=drafter.observe)
        chunks = [(slot, [(i + slot) % 50 for i in range(length)]) for slot, length in zip(slots, lengths, strict=True)]
        results.append(runner.prefill(chunks, drafter.tap_layers, params, drafter.observe))
        assert [runner.cache.lengths[slot] for slot in slots] == [3 + lengths[0], *lengths[1:]]
        caches.append([drafter.cache.rows[:, :, slot, :, : drafter.cache.lengths[slot]] for slot in slots])
    expected, found = results
    assert list(found.row_starts) == list(expected.row_starts)
    for name in ("logits", "hidden"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)
    positions = [3 + lengths[0], *lengths[1:]]
    assert found.best is not None and list(found.best) == [
        int(choose_tokens(expected.logits[row : row + 1], one, [position]))
        for row, (one, position) in enumerate(zip(params, positions, strict=True))
    ]


def test_a_check_of_too_many_rows_runs_unrecorded() -> None:
    planned = make_gpu_llm("llama", drafter=make_dflash())
    runner = planned.engine.runner
    assert isinstance(runner, GpuTargetRunner)
    runner.max_rows = 8
    expected = make_llm("llama").generate("abcabc", SamplingParams(max_new_tokens=12), is_raw=True)
    found = planned.generate("abcabc", SamplingParams(max_new_tokens=12), pilot="tree:15", is_raw=True)
    assert found.token_ids == expected.token_ids
    assert not runner._passes or max(count for _, count, _, _ in runner._passes) <= 8


def test_spare_slots_are_never_handed_out() -> None:
    cache = make_gpu_llm("llama", drafter=make_dflash()).engine.runner.cache
    taken = [cache.reserve() for _ in range(cache.num_free)]
    assert cache.rows.shape[2] - 1 not in taken


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    with pytest.raises(InputError, match=r"needs 3\.0 GiB and the GPU has 1\.0 GiB free: lower the number of slots"):
        gpu.check_memory(torch.device("cuda"), 3 * 2**30, "the target's cache")


def test_without_triton_one_warning_and_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu._warn_once.cache_clear()
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    for _ in range(2):
        assert not gpu.can_fuse(torch.device("cuda"), 64, torch.bfloat16)
    assert len(caplog.records) == 1 and "pip install triton" in caplog.text


def test_head_sizes_that_are_not_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    device = torch.device("cuda")
    assert gpu.can_fuse(device, 128, torch.float32)
    assert not gpu.can_fuse(device, 512, torch.bfloat16)
    assert "heads of size 512" in caplog.text
    monkeypatch.setattr(gpu, "has_large_memory", lambda device: False)
    assert gpu.can_fuse(device, 256, torch.bfloat16)
    assert not gpu.can_fuse(device, 256, torch.float32)
    assert "choose bfloat16" in caplog.text


def test_prepared_passes_are_those_that_decoding_uses() -> None:
    planned = make_gpu_llm("llama", drafter=make_dflash())
    runner, drafter = planned.engine.runner, planned.drafter
    assert isinstance(runner, GpuTargetRunner) and isinstance(drafter, GpuDFlashDrafter)
    told: list[int] = []
    planned.prepare(4, told.append)
    assert told == [1, 2, 4]
    recorded = set(runner._passes), set(drafter._drafts), set(drafter.views._views), set(runner._moves)
    params = [SamplingParams(max_new_tokens=6 + 8 * index) for index in range(4)]  # the batch shrinks to one
    for pilot in ("fixed:7", "fixed:8", "tree:15", "tree:70"):
        planned.generate(PROMPTS, params, pilot=pilot, is_raw=True)
    assert (set(runner._passes), set(drafter._drafts), set(drafter.views._views), set(runner._moves)) == recorded


def test_taps_that_come_once_are_not_recorded() -> None:
    planned = make_gpu_llm("llama", drafter=make_dflash())
    runner, drafter = planned.engine.runner, planned.drafter
    assert isinstance(runner, GpuTargetRunner) and isinstance(drafter, GpuDFlashDrafter)
    planned.prepare()
    recorded = set(drafter.views._views)
    runner.max_rows = 1  # every check runs unrecorded, with taps of its own
    planned.generate("abcabcab", SamplingParams(max_new_tokens=12), pilot="fixed:4", is_raw=True)
    assert set(drafter.views._views) == recorded
