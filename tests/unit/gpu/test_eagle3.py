"""EAGLE-3 chains of fixed shape draft what unplanned ones draft. Here with the kernels' reference implementation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blockpilot.core.draft import HostDraft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.engine import assemble
from blockpilot.engine.llm import LLM
from blockpilot.gpu.eagle3 import GpuEagle3Drafter
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.models.eagle3 import Eagle3
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.cost_model import StepCosts
from tests.tiny import RandomTreePilot, make_decoder, make_eagle3, make_llm, make_placement

PROMPTS = ["abcabcab", "the quick brown fox", "z", "hello hello hello"]
GREEDY = SamplingParams()
NUM_SLOTS = 4
ROWS = 64  # of the pretended result buffer
FAVOURITES = [11, 25]  # what the targets here mostly say, and all their drafters know: drafts are right now and then


def make_plain(name: str = "qwen3", **options: Any) -> LLM:
    drafter = make_eagle3(name, draft_vocab_size=len(FAVOURITES))
    drafter.draft_token_ids = torch.tensor(FAVOURITES)
    llm = make_llm(name, drafter=drafter, costs=StepCosts.linear(draft=0.01), **options)
    llm.engine.runner.decoder.lm_head.weight[FAVOURITES] *= 3
    return llm


def make_planned(monkeypatch: pytest.MonkeyPatch, name: str = "qwen3", **options: Any) -> LLM:
    monkeypatch.setattr(assemble, "can_fuse", lambda *given: True)
    llm = make_plain(name, **options)
    monkeypatch.undo()
    assert isinstance(llm.engine.runner, GpuTargetRunner) and isinstance(llm.drafter, GpuEagle3Drafter)
    return llm


def answers(llm: LLM, pilot: str | list[Pilot], params: Any) -> list[tuple[list[int], list[int]]]:
    """Texts, and what was emitted at each step: the same drafts were accepted, not only the same text."""
    found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
    return [(answer.token_ids, [step.emitted for step in answer.steps]) for answer in found]


def make_model(*, is_residual_normed: bool = False, **options: Any) -> Eagle3:
    model = make_eagle3(**options)
    model.midlayer.is_residual_normed = is_residual_normed
    return model


def make_pair(model: Eagle3) -> tuple[GpuEagle3Drafter, Eagle3Drafter]:
    placement, embed = make_placement(NUM_SLOTS, 64), make_decoder().embed_tokens
    return GpuEagle3Drafter(model, placement, embed=embed), Eagle3Drafter(model, placement, embed=embed)


def make_taps(model: Eagle3, seed: int, count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, model.fc.in_features, generator=torch.Generator().manual_seed(seed))


def request(slot: int, position: int, block_size: int = 6, width: int = 1) -> DraftRequest:
    return DraftRequest(
        slot=slot, anchor_id=7 + slot, position=position, block_size=block_size, num_candidates=width, params=GREEDY
    )


def assert_same(found: list[HostDraft], expected: list[HostDraft]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
        assert ours.token_ids.dtype == theirs.token_ids.dtype and ours.log_probs.dtype == theirs.log_probs.dtype


@pytest.mark.parametrize("name", ["llama-untied", "llama3-rope", "qwen3"])
def test_planned_chains_decode_as_unplanned_ones_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain, planned = make_plain(name), make_planned(monkeypatch, name)
    params = [SamplingParams(max_new_tokens=18 + 6 * i) for i in range(4)]
    for pilot in ("ar", "fixed:2", "fixed:4", "fixed:8", "chain-step", "tree:15"):
        found = answers(planned, pilot, params)
        expected = answers(plain, pilot, params)
        if pilot == "chain-step":  # where checks are padded, the number of nodes is decided before the draft
            found, expected = ([(ids, []) for ids, _ in each] for each in (found, expected))
        assert found == expected, pilot
        emitted = [count for _, counts in found for count in counts]
        assert pilot in ("ar", "chain-step") or max(emitted) > 1  # some drafts are right


def test_requests_that_draft_different_sizes_share_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, planned = make_plain(), make_planned(monkeypatch)
    params = [SamplingParams(max_new_tokens=40 - 7 * i) for i in range(4)]

    def pilots() -> list[Pilot]:
        return [RandomTreePilot(seed, num_candidates=1) for seed in range(4)]

    assert answers(planned, pilots(), params) == answers(plain, pilots(), params)


def test_sampling_and_trees_run_unplanned_beside_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, planned = make_plain(), make_planned(monkeypatch)
    params = [SamplingParams(max_new_tokens=20 + 3 * i, temperature=0.7 * (i % 2), seed=i) for i in range(4)]

    def pilots() -> list[Pilot]:
        return [RandomTreePilot(seed, num_candidates=1 + 3 * (seed // 2)) for seed in range(4)]

    for temperature in (0.0, 0.8):
        all_params = [replace(one, temperature=temperature * one.temperature) for one in params]
        assert answers(planned, pilots(), all_params) == answers(plain, pilots(), all_params)
        assert answers(planned, "fixed:4", all_params) == answers(plain, "fixed:4", all_params)


def test_slots_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than slots, in turns: who comes later knows nothing of who was there before."""
    plain, planned = make_plain(num_slots=2), make_planned(monkeypatch, num_slots=2)
    params = [SamplingParams(max_new_tokens=10 + 9 * (i % 2)) for i in range(4)]
    for _ in range(2):
        assert answers(planned, "fixed:6", params) == answers(plain, "fixed:6", params)


@pytest.mark.parametrize("is_residual_normed", [False, True])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_proposals_equal_unplanned_ones(is_residual_normed: bool, has_embedding: bool) -> None:
    model = make_model(is_residual_normed=is_residual_normed, has_embedding=has_embedding)
    planned, plain = make_pair(model)
    taps = make_taps(model, 0)
    planned.bind(taps)
    lengths = [9, 2, 5]
    prompts = [Observation(slot, [3 + slot] * length, taps[:length]) for slot, length in enumerate(lengths)]
    for drafter in (planned, plain):
        drafter.observe(prompts)
    counts = ([3, 1, 8], [1, 2, 1], [5, 4, 2])
    for step, added in enumerate(counts):
        requests = [request(slot, length, block_size=2 + 3 * slot) for slot, length in enumerate(lengths)]
        assert_same(planned.propose(requests), plain.propose(requests))
        assert planned.cache.lengths == plain.cache.lengths and planned.cache.appended == plain.cache.appended
        taps.copy_(make_taps(model, step + 1))
        observations = [
            Observation(slot, [slot + step] * count, taps, range(16 * slot, 16 * slot + count))
            for slot, count in enumerate(added)
        ]
        for drafter in (planned, plain):
            drafter.observe(observations)
        lengths = [length + count for length, count in zip(lengths, added, strict=True)]
        torch.testing.assert_close(planned._states[:3], plain._states[:3])
    assert planned.views._views and planned._chains
    assert_same(planned.propose([request(1, lengths[1])]), plain.propose([request(1, lengths[1])]))
    trees = [request(slot, length, width=5) for slot, length in enumerate(lengths)]
    assert_same(planned.propose(trees), plain.propose(trees))


def test_a_forgotten_slot_begins_anew() -> None:
    model = make_model()
    planned, plain = make_pair(model)
    taps = make_taps(model, 3)
    planned.observe([Observation(2, [1, 2, 3], taps[:3])])
    planned.observe([Observation(2, [4, 5], taps, [8, 9])])
    planned.forget(2)
    assert planned.cache.lengths[2] == 0
    for drafter in (planned, plain):
        drafter.observe([Observation(2, [6, 8, 9], taps, [1, 4, 2])])  # rows of the buffer, but nothing waits
        drafter.observe([Observation(2, [5], taps, [7])])
    assert planned.cache.lengths[2] == 3
    assert_same(planned.propose([request(2, 4)]), plain.propose([request(2, 4)]))


def test_taps_that_come_once_are_not_recorded() -> None:
    """A check of too many rows runs unplanned and leaves fresh taps at each step."""
    model = make_model()
    planned, plain = make_pair(model)
    buffer = make_taps(model, 0)
    for drafter in (planned, plain):
        drafter.observe([Observation(0, [1, 2, 3], buffer[:3])])
    planned.bind(buffer)
    planned.prepare(1)
    recorded = dict(planned.views._views)
    for step in range(3):
        for taps in (make_taps(model, step), buffer, buffer):
            for drafter in (planned, plain):
                drafter.observe([Observation(0, [4, 5], taps, [6, 7])])
    assert planned.views._views == recorded
    torch.testing.assert_close(planned._states[0], plain._states[0])
    assert_same(planned.propose([request(0, 21)]), plain.propose([request(0, 21)]))


def test_chains_that_round_up_leave_other_slots_alone() -> None:
    model = make_model()
    planned, _ = make_pair(model)
    taps = make_taps(model, 1)
    planned.observe([Observation(slot, [1, 2, 3, 4], taps[:4]) for slot in range(4)])
    rows, states = planned.cache.rows[:, :, :4, :, :3].clone(), planned._states[:4].clone()
    planned.bind(taps)
    planned.prepare(4)
    planned.propose([request(slot, 4) for slot in range(3)])
    assert torch.equal(planned.cache.rows[:, :, :4, :, :3], rows) and torch.equal(planned._states[:4], states)
    planned.observe([Observation(slot, [5], taps, [9]) for slot in range(3)])
    assert torch.equal(planned._states[3], states[3]) and torch.equal(planned.cache.rows[:, :, :4, :, :3], rows)
    assert planned.cache.lengths == [4, 4, 4, 3]


def test_prepared_graphs_are_those_that_decoding_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make_planned(monkeypatch)
    drafter = planned.drafter
    assert isinstance(drafter, GpuEagle3Drafter)
    planned.prepare(1)
    recorded = set(drafter._chains), set(drafter.views._views)
    for pilot in ("fixed:4", "fixed:6", "fixed:8"):
        planned.generate("abcabcab", SamplingParams(max_new_tokens=30), pilot=pilot, is_raw=True)
    assert (set(drafter._chains), set(drafter.views._views)) == recorded
