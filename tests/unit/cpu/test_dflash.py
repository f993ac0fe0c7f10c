"""Drafts of compiled passes: near those of PyTorch with the same weights, and the same bits in every batch."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.core.draft import HostDraft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.cpu import dflash
from blockpilot.cpu.dflash import CpuDFlashDrafter
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.engine.assemble import build_drafter
from blockpilot.models.dflash import DFlash
from blockpilot.models.packing import pack_linears
from blockpilot.native.library import MAX_RANKED, open_kernels
from tests.tiny import VOCAB_SIZE, make_decoder, make_dflash, make_placement
from tests.unit.cpu.pieces import packed_decoder

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=21)
LENGTHS = [3, 17, 60]
PLACEMENT = make_placement(num_slots=3, linear_backend="int8")

both_kinds = pytest.mark.parametrize("is_second", [False, True])
both_heads = pytest.mark.parametrize("is_reduced", [False, True])
both_params = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def make_model(name: str, *, is_second: bool, is_reduced: bool = False) -> DFlash:
    model = make_dflash(name, is_second=is_second)
    if is_reduced:
        model.draft_token_ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:41]
    return model


def make_drafter(
    name: str = "llama-int8", *, is_second: bool = True, is_reduced: bool = False, num_threads: int = 1
) -> CpuDFlashDrafter:
    decoder = make_decoder(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockpilot.models.packing.machine_kernels", lambda: open_kernels(num_threads))
        drafter = build_drafter(make_model(name, is_second=is_second, is_reduced=is_reduced), decoder, PLACEMENT)
    assert isinstance(drafter, CpuDFlashDrafter)
    pack_linears(decoder, "int8")
    return drafter


def make_taps(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, 2 * 64, generator=torch.Generator().manual_seed(seed))


def make_observations() -> list[Observation]:
    return [Observation(slot, [0] * length, make_taps(length, slot)) for slot, length in enumerate(LENGTHS)]


def request(slot: int, block_size: int = 8, num_candidates: int = 4, params: SamplingParams = GREEDY) -> DraftRequest:
    return DraftRequest(slot, 7 + slot, LENGTHS[slot], block_size, num_candidates, params)


def assert_equal(first: HostDraft, second: HostDraft) -> None:
    for name in ("token_ids", "log_probs", "first", "pairwise"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def join(drafts: Sequence[HostDraft], name: str) -> np.ndarray:
    return np.concatenate([getattr(draft, name).reshape(-1, draft.width) for draft in drafts])


@pytest.mark.parametrize("name", ["llama-int8", "qwen3-int8", "qwen3_moe-int8"])
@both_kinds
@both_heads
@both_params
def test_drafts_lie_near_those_of_pytorch(name: str, is_second: bool, is_reduced: bool, params: SamplingParams) -> None:
    ours = make_drafter(name, is_second=is_second, is_reduced=is_reduced)
    model = make_model(name, is_second=is_second, is_reduced=is_reduced)
    theirs = DFlashDrafter(model, PLACEMENT, embed=packed_decoder(name).embed_tokens, head=ours.head)
    for drafter in (ours, theirs):
        drafter.observe(make_observations())
    rows, expected_rows = (drafter.cache.copy_rows(2, 0, LENGTHS[2]).float() for drafter in (ours, theirs))
    assert (rows - expected_rows).norm() < 1e-3 * expected_rows.norm()
    requests = [request(slot, params=params) for slot in range(3)]
    found, expected = ours.propose(requests), theirs.propose(requests)
    ids, expected_ids = join(found, "token_ids"), join(expected, "token_ids")
    assert ids.dtype == expected_ids.dtype and ids.shape == expected_ids.shape == (21, 4)
    assert (ids[:, 0] == expected_ids[:, 0]).mean() > 0.75 and (ids == expected_ids).mean() > 0.6
    assert np.abs(join(found, "log_probs") - join(expected, "log_probs")).mean() < 0.15
    for one, other in zip(found, expected, strict=True):
        assert (one.first is None) == (other.first is None) == (not is_second)
    if is_second:
        firsts = [(one, other) for one, other in zip(found, expected, strict=True) if same_ids(one, other, 0)]
        assert firsts, "no first position has the same candidates"
        assert all(np.abs(one.first - other.first).max() < 0.6 for one, other in firsts)  # type: ignore[operator]
        offs = [
            np.abs(one.pairwise[place - 1] - other.pairwise[place - 1]).mean()  # type: ignore[index]
            for one, other in zip(found, expected, strict=True)
            for place in range(1, 7)
            if same_ids(one, other, place - 1) and same_ids(one, other, place)
        ]
        assert offs and np.mean(offs) < 0.2


def same_ids(one: HostDraft, other: HostDraft, place: int) -> bool:
    return bool((one.token_ids[place] == other.token_ids[place]).all())


@both_kinds
@both_heads
@both_params
def test_hidden_states_are_ranked_as_in_pytorch(
    is_second: bool, is_reduced: bool, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the same states the same tokens, with the same scores of pairs."""
    drafter = make_drafter(is_second=is_second, is_reduced=is_reduced)
    forward, states = drafter.kernels.forward, []

    def run(space: Any, model: Any, cache: Any, batch: Any, wanted: Any, ranking: Any) -> None:
        forward(space, model, cache, batch, wanted, ranking)
        normed = (ctypes.c_float * (wanted.count * model.hidden)).from_address(ranking.normed)
        states.extend(torch.tensor(normed).view(wanted.count, model.hidden).split(11))

    monkeypatch.setattr(drafter.kernels, "forward", run)
    drafter.observe(make_observations())
    requests = [request(slot, 12, 5, params) for slot in range(3)]
    for one, found, hidden in zip(requests, drafter.propose(requests), states, strict=True):
        expected = drafter._rank_one(one, drafter.head(hidden), hidden).map(lambda part: part[0].numpy())
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        for name in ("log_probs", "first", "pairwise"):
            if getattr(expected, name) is not None:
                np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


@both_kinds
@both_heads
@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(2, 20), min_size=3, max_size=3),
    order=st.permutations(range(3)),
    temperatures=st.lists(st.sampled_from([0.0, 0.7, 2.0]), min_size=3, max_size=3),
    num_candidates=st.integers(1, 7),
)
def test_a_batch_is_its_requests_bit_for_bit(
    is_second: bool,
    is_reduced: bool,
    sizes: list[int],
    order: list[int],
    temperatures: list[float],
    num_candidates: int,
) -> None:
    drafter = make_drafter(is_second=is_second, is_reduced=is_reduced)
    drafter.observe(make_observations())
    requests = [
        request(slot, sizes[slot], num_candidates, SamplingParams(temperature=temperatures[slot], seed=slot))
        for slot in order
    ]
    together = drafter.propose(requests)
    assert [draft.num_positions for draft in together] == [one.block_size - 1 for one in requests]
    for one, draft in zip(requests, together, strict=True):
        assert_equal(drafter.propose([one])[0], draft)


@both_kinds
def test_threads_change_no_bit(is_second: bool) -> None:
    drafts = []
    for num_threads in (1, 2, 3):
        drafter = make_drafter("qwen3-int8", is_second=is_second, num_threads=num_threads)
        drafter.observe(make_observations())
        drafts.append(drafter.propose([request(slot, 13, params=SAMPLED) for slot in range(3)]))
    for others in drafts[1:]:
        for one, other in zip(drafts[0], others, strict=True):
            assert_equal(one, other)


@both_kinds
def test_taps_in_pieces_leave_what_all_at_once_leave(is_second: bool) -> None:
    """With drafts and other slots in between."""
    pieces, whole = (make_drafter(is_second=is_second) for _ in range(2))
    taps = make_taps(60, 2)
    for start, end in ((0, 6), (6, 7), (7, 40), (40, 60)):
        pieces.observe([Observation(2, [0] * (end - start), taps[start:end]), Observation(0, [0], make_taps(1))])
        pieces.propose([request(2)._replace(position=end)])
    whole.observe([Observation(2, [0] * 60, taps)])
    assert torch.equal(pieces.cache.copy_rows(2, 0, 60), whole.cache.copy_rows(2, 0, 60))
    assert_equal(pieces.propose([request(2), request(0)])[0], whole.propose([request(2)])[0])
    assert pieces.cache.lengths == [4, 0, 60]


@both_kinds
@pytest.mark.parametrize("count", [1, 31, 32, 67])
def test_tokens_that_come_one_by_one_are_looked_at_before_the_next_draft(
    is_second: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a request that takes up the rows of one that never drafted."""
    single, whole, resumed = (make_drafter(is_second=is_second) for _ in range(3))
    taps = make_taps(6 + count, 2)
    monkeypatch.setattr(dflash, "MOST_UNSEEN", taps[:32].nbytes)
    for drafter in (single, resumed):
        drafter.observe([Observation(1, [0] * 6, taps[:6])])
        for place in range(6, 6 + count):
            drafter.observe([Observation(1, [0], taps, [place])])
    assert single.cache.lengths[1] == 6 + count // 32 * 32
    resumed.forget(1)
    resumed.resume(1, [0] * (6 + count))
    whole.observe([Observation(1, [0] * (6 + count), taps)])
    asked = [request(1)._replace(position=6 + count)]
    expected = whole.propose(asked)[0]
    for drafter in (single, resumed):
        assert_equal(drafter.propose(asked)[0], expected)
        assert drafter.cache.lengths[1] == 6 + count


@both_kinds
def test_prompts_that_can_wait_are_read_before_the_first_draft(
    is_second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, behind checked copies, by a request that takes up an earlier one's rows, where memory runs short."""
    whole, waiting, resumed, short = (make_drafter(is_second=is_second) for _ in range(4))
    taps, room = make_taps(60, 2), make_taps(40)
    whole.observe([Observation(1, [0] * 60, taps)])
    expected = whole.propose([request(1)._replace(position=60)])[0]
    for drafter in (waiting, resumed, short):
        if drafter is short:
            monkeypatch.setattr(dflash, "MOST_UNSEEN", taps[:50].nbytes)
        drafter.observe([Observation(1, [0] * 9, make_taps(9, 5), can_wait=True)])  # of another text
        drafter.forget(1)
        room[:] = taps[:40]
        drafter.observe([Observation(1, [0] * 40, room, can_wait=True)])
        room.zero_()
        drafter.observe([Observation(1, [0] * 4, taps, [40, 41, 42, 43]), Observation(0, [0], make_taps(1), [0])])
        assert drafter.cache.lengths == [0, 0, 0]
        if drafter is resumed:
            drafter.forget(1)
            drafter.resume(1, [0] * 42)
            drafter.observe([Observation(1, [0] * 2, taps[42:44], can_wait=True)])
        if drafter is short:
            drafter.forget(1)
            drafter.observe([Observation(2, [0] * 20, make_taps(20), can_wait=True)])
            assert drafter.cache.lengths == [0, 0, 0], "its rows are there, and nobody's"
            drafter.resume(1, [0] * 44)
            assert drafter.cache.lengths == [0, 44, 0]
        drafter.observe([Observation(1, [0] * 16, taps[44:], can_wait=True)])
        assert_equal(drafter.propose([request(1)._replace(position=60)])[0], expected)
        assert torch.equal(drafter.cache.copy_rows(1, 0, 60), whole.cache.copy_rows(1, 0, 60))


def test_rows_of_a_whole_pass() -> None:
    """As a check leaves its taps: those of accepted nodes, of several requests."""
    shared, apart = make_drafter(), make_drafter()
    taps, rows = make_taps(30), [[0, 2, 5], [11, 12], [29]]
    shared.observe([Observation(slot, [0] * len(own), taps, own) for slot, own in enumerate(rows)])
    apart.observe([Observation(slot, [0] * len(own), taps[own]) for slot, own in enumerate(rows)])
    for drafter in (shared, apart):  # single tokens wait for a draft
        drafter.propose([request(slot) for slot in range(len(rows))])
    for slot, own in enumerate(rows):
        assert torch.equal(*(drafter.cache.copy_rows(slot, 0, len(own)) for drafter in (shared, apart)))


def test_a_forgotten_slot_starts_anew() -> None:
    drafter, fresh = make_drafter(), make_drafter()
    drafter.observe([Observation(0, [0] * 50, make_taps(50, 9))])
    drafter.propose([request(0)._replace(position=50)])
    drafter.forget(0)
    for one in (drafter, fresh):
        one.observe(make_observations())
    assert_equal(drafter.propose([request(0)])[0], fresh.propose([request(0)])[0])


@both_heads
@both_params
def test_candidates_are_distinct_best_first_and_probabilities(is_reduced: bool, params: SamplingParams) -> None:
    drafter = make_drafter(is_second=False, is_reduced=is_reduced)
    drafter.observe(make_observations())
    found = drafter.propose([request(1, num_candidates=MAX_RANKED, params=params)])[0]
    assert found.width == (41 if is_reduced else VOCAB_SIZE)
    assert (np.diff(found.log_probs, axis=1) <= 0).all()
    assert all(len(set(row)) == found.width for row in found.token_ids.tolist())
    np.testing.assert_allclose(np.exp(found.log_probs).sum(axis=1), 1, atol=1e-4)
    if is_reduced:
        assert set(found.token_ids.flatten().tolist()) == set(drafter.token_ids.tolist())  # type: ignore[union-attr]
    few = drafter.propose([request(1, num_candidates=3, params=params)])[0]
    np.testing.assert_array_equal(few.token_ids, found.token_ids[:, :3])
    np.testing.assert_array_equal(few.log_probs, found.log_probs[:, :3])


@both_params
def test_pairs_are_probabilities_and_are_cut_to_what_is_asked_for(params: SamplingParams) -> None:
    drafter = make_drafter()
    drafter.observe(make_observations())
    whole = drafter.propose([request(1, num_candidates=500, params=params)])[0]
    assert whole.width == 5 and whole.first is not None and whole.pairwise is not None
    assert whole.first.shape == (5,) and whole.pairwise.shape == (6, 5, 5)
    np.testing.assert_allclose(np.exp(whole.first).sum(), 1, atol=1e-5)
    np.testing.assert_allclose(np.exp(whole.pairwise).sum(axis=-1), 1, atol=1e-5)
    few = drafter.propose([request(1, num_candidates=2, params=params)])[0]
    np.testing.assert_array_equal(few.first, whole.first[:2])
    np.testing.assert_array_equal(few.pairwise, whole.pairwise[:, :2, :2])


def test_the_reduced_head_is_the_full_head_restricted_to_its_ids() -> None:
    """Also where the target's weights are packed before the drafter runs."""
    reduced, full = (make_drafter(is_second=False, is_reduced=is_reduced) for is_reduced in (True, False))
    for drafter in (reduced, full):
        drafter.observe(make_observations())
    asked = request(1, num_candidates=VOCAB_SIZE, params=SAMPLED)
    ours, theirs = reduced.propose([asked])[0], full.propose([asked])[0]
    for row in range(ours.num_positions):
        is_kept = np.isin(theirs.token_ids[row], reduced.token_ids.numpy())  # type: ignore[union-attr]
        np.testing.assert_array_equal(ours.token_ids[row], theirs.token_ids[row][is_kept])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_drafters_of_other_shapes_run_in_pytorch(name: str) -> None:
    drafter = build_drafter(make_dflash(name), make_decoder(name), PLACEMENT)
    assert type(drafter) is DFlashDrafter
