"""Passes of fixed shape give what unrecorded passes give. Here with the kernels' reference implementation, on a CPU."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.engine.llm import LLM
from blockpilot.gpu import device as gpu
from blockpilot.gpu import target
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.target import GpuTargetRunner
from tests.tiny import CONTEXT_LENGTH, RandomTreePilot, make_dflash, make_eagle3, make_llm
from tests.unit.gpu.late_device import make_gpu_llm

PROMPTS = ["abcabcab", "the quick brown fox", "z", "hello hello hello"]
PILOTS = ["ar", "fixed:4", "tree:15", "tree:70"]


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
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


def read_prompts(llm: LLM, chunks: list[list[int]]) -> tuple[Any, dict[int, list[int]], dict[int, Tensor]]:
    """The result of a prefill, and what was shown of each slot: tokens and taps."""
    runner, ids, taps = llm.engine.runner, defaultdict(list), defaultdict(list)

    def show(observations: list[Observation]) -> None:
        for one in observations:
            own = one.own_taps()
            assert own is not None
            ids[one.slot] += one.token_ids
            taps[one.slot].append(own.clone())

    given = [(runner.cache.reserve(), chunk) for chunk in chunks]
    result = runner.prefill(given, (0, 2), show=show)
    return result, dict(ids), {slot: torch.cat(parts) for slot, parts in taps.items()}


@pytest.mark.parametrize("lengths", [(1,), (16,), (17,), (3, 33), (40, 1, 16, 70)])
@pytest.mark.parametrize(("sizes", "max_rows"), [((1, 4, 16), 516), ((1, 4, 16, 512), 64), ((1, 4), 4)])
def test_every_token_of_a_prompt_is_read_once_and_shown(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], sizes: tuple[int, ...], max_rows: int
) -> None:
    """However prompts are cut: by the largest piece, or by the rows that a pass may have."""
    monkeypatch.setattr(target, "PROMPT_TOKENS", sizes)
    monkeypatch.setattr(target, "MAX_PROMPT_ROWS", max_rows)
    plain, planned = make_llm("qwen3"), make_gpu_llm("qwen3")
    runner = planned.engine.runner
    assert isinstance(runner, GpuTargetRunner)
    chunks = [[(7 * place + index) % 60 for index in range(length)] for place, length in enumerate(lengths)]
    (expected, _, expected_taps), (found, ids, taps) = (read_prompts(llm, chunks) for llm in (plain, planned))
    assert list(ids.values()) == chunks
    torch.testing.assert_close(taps, expected_taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert list(found.best_ids()) == list(expected.best_ids())
    assert all(count in sizes and num_requests * count <= max_rows for num_requests, count, _ in runner._prompts)


def test_padding_behind_a_full_slot_touches_no_row_that_counts() -> None:
    """The first prompt ends at the last position; beside the second its piece would reach beyond the slot."""
    caches, results = [], []
    for make in (make_llm, make_gpu_llm):
        runner = make("qwen3").engine.runner
        first, second, other = (runner.cache.reserve() for _ in range(3))
        start, length = CONTEXT_LENGTH - 10, CONTEXT_LENGTH
        runner.prefill([(first, [index % 60 for index in range(start)])], ())
        runner.cache.rows[:, :, other] = 7.0
        results.append(runner.prefill([(first, [5] * 10), (second, [index % 50 for index in range(length)])], ()))
        assert bool((runner.cache.rows[:, :, other] == 7.0).all())
        caches.append(runner.cache.rows[:, :, [first, second], :, :length])
    assert isinstance(runner, GpuTargetRunner)
    assert start + max(count for _, count, _ in runner._prompts) > runner.cache.capacity
    torch.testing.assert_close(results[1].logits, results[0].logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-4, atol=1e-4)


def test_a_check_of_too_many_rows_runs_in_several_passes() -> None:
    planned = make_gpu_llm("llama", drafter=make_dflash())
    runner = planned.engine.runner
    assert isinstance(runner, GpuTargetRunner)
    runner.max_rows = 32  # two trees of 16
    params = SamplingParams(max_new_tokens=12)
    expected = make_llm("llama").generate(PROMPTS, params, is_raw=True)
    found = planned.generate(PROMPTS, params, pilot="tree:15", is_raw=True)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert max(num_requests * count for num_requests, count, *_ in runner._passes) == 32


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
    assert "heads of size 512" in caplog.text and "near-ties" in caplog.text
    monkeypatch.setattr(gpu, "has_large_memory", lambda device: False)
    assert gpu.can_fuse(device, 256, torch.bfloat16)
    assert not gpu.can_fuse(device, 256, torch.float32)
    assert "choose bfloat16" in caplog.text


def test_sizes_of_their_own_are_not_rounded_up() -> None:
    """A chain of 7 tokens is drafted and checked in passes of 7, not of 8; the text is the same."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = []
    for own_shapes, shape in (((), 8), ((5, 7), 7)):
        llm = make_gpu_llm("llama", drafter=make_dflash(), own_shapes=own_shapes)
        runner, drafter = llm.engine.runner, llm.drafter
        assert isinstance(runner, GpuTargetRunner) and isinstance(drafter, GpuDFlashDrafter)
        assert {*own_shapes} < {*runner.buckets}
        texts.append([answer.token_ids for answer in llm.generate(PROMPTS[:1], params, pilot="fixed:7", is_raw=True)])
        assert {key[1] for key in drafter._drafts} == {shape} and shape in {key[1] for key in runner._passes}
        assert (8 in {key[1] for key in runner._passes}) == (shape == 8)
    assert texts[0] == texts[1]


def test_prepared_passes_are_those_that_decoding_uses() -> None:
    planned = make_gpu_llm("llama", drafter=make_dflash())
    runner, drafter = planned.engine.runner, planned.drafter
    assert isinstance(runner, GpuTargetRunner) and isinstance(drafter, GpuDFlashDrafter)
    told: list[int] = []
    planned.prepare(4, told.append)
    assert told == [1, 2, 4]
    kept = runner._passes, runner._prompts, drafter._drafts, drafter.views._views, runner._moves
    recorded = [set(one) for one in kept]
    params = [SamplingParams(max_new_tokens=6 + 8 * index) for index in range(4)]  # the batch shrinks to one
    for pilot in ("fixed:7", "fixed:8", "tree:15", "tree:70"):
        planned.generate(PROMPTS, params, pilot=pilot, is_raw=True)
    assert [set(one) for one in kept] == recorded
