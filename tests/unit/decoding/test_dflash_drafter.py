"""Drafting with DFlash: batches, the context cache, candidates, shared noise, the reduced head."""

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.core.draft import HostDraft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.engine.assemble import build_drafter
from blockpilot.models.dflash import DFlash
from tests.tiny import VOCAB_SIZE, make_decoder, make_dflash, make_placement

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=21)
LENGTHS = [3, 17, 1]


def make_drafter(model: DFlash) -> DFlashDrafter:
    drafter = build_drafter(
        model,
        make_decoder(),
        make_placement(num_slots=3),
    )
    assert isinstance(drafter, DFlashDrafter)
    return drafter


def make_taps(seed: int, length: int) -> Tensor:
    return torch.randn(length, 2 * 32, generator=torch.Generator().manual_seed(seed))


def request(
    slot: int, length: int, block_size: int = 6, num_candidates: int = 4, params: SamplingParams = GREEDY
) -> DraftRequest:
    return DraftRequest(
        slot=slot,
        anchor_id=7 + slot,
        position=length,
        block_size=block_size,
        num_candidates=num_candidates,
        params=params,
    )


def observe(drafter: DFlashDrafter, slot: int, taps: Tensor) -> None:
    drafter.observe([Observation(slot, [0] * len(taps), taps)])


def assert_same(first: HostDraft, second: HostDraft, tolerance: float = 1e-5) -> None:
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    for name in ("log_probs", "first", "pairwise"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_batch_of_different_block_sizes_equals_one_by_one(is_second: bool, params: SamplingParams) -> None:
    drafter = make_drafter(make_dflash(is_second=is_second))
    drafter.observe([Observation(slot, [0] * n, make_taps(slot, n)) for slot, n in enumerate(LENGTHS)])
    requests = [request(slot, LENGTHS[slot], size, params=params) for slot, size in ((1, 9), (0, 2), (2, 5))]
    together = drafter.propose(requests)
    assert [candidates.num_positions for candidates in together] == [8, 1, 4]
    for one, candidates in zip(requests, together, strict=True):
        assert_same(drafter.propose([one])[0], candidates)


@pytest.mark.parametrize("is_second", [False, True])
def test_the_context_cache_equals_recomputation(is_second: bool) -> None:
    """Taps in pieces, with drafts and other slots in between, leave what all taps at once leave."""
    model, taps = make_dflash(is_second=is_second), make_taps(5, 14)
    pieces, whole = make_drafter(model), make_drafter(model)
    for start, end in ((0, 6), (6, 7), (7, 11), (11, 14)):
        observe(pieces, 1, taps[start:end])
        pieces.propose([request(1, end, block_size=8)])  # a block is never kept
        observe(pieces, 0, make_taps(start, 2))
    observe(whole, 1, taps)
    assert pieces.cache.lengths[1] == 14
    assert_same(pieces.propose([request(1, 14)])[0], whole.propose([request(1, 14)])[0])


def test_a_forgotten_slot_starts_anew() -> None:
    drafter = make_drafter(make_dflash())
    observe(drafter, 0, make_taps(1, 9))
    drafter.forget(0)
    observe(drafter, 0, make_taps(2, 4))
    fresh = make_drafter(make_dflash())
    observe(fresh, 0, make_taps(2, 4))
    assert_same(drafter.propose([request(0, 4)])[0], fresh.propose([request(0, 4)])[0])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_second", [False, True])
def test_candidates_are_distinct_best_first_and_probabilities(is_second: bool, params: SamplingParams) -> None:
    drafter = make_drafter(make_dflash(is_second=is_second))
    observe(drafter, 0, make_taps(3, 10))
    found = drafter.propose([request(0, 10, num_candidates=4, params=params)])[0]
    assert found.width == 4
    assert (np.diff(found.log_probs, axis=1) <= 0).all()
    assert all(len(set(row)) == found.width for row in found.token_ids.tolist())
    assert (np.exp(found.log_probs).sum(axis=1) <= 1 + 1e-5).all()
    if is_second:
        assert found.first is not None and found.pairwise is not None
        assert np.exp(found.first).sum() < 1 and (np.exp(found.pairwise).sum(axis=-1) < 1).all(), "one is not shown"
        whole = drafter.propose([request(0, 10, num_candidates=500, params=params)])[0]
        assert whole.width == 5 and whole.first is not None and whole.pairwise is not None
        np.testing.assert_array_equal(whole.pairwise[:, :4, :4], found.pairwise)
        np.testing.assert_allclose(np.exp(whole.first).sum(), 1, atol=1e-5)
        np.testing.assert_allclose(np.exp(whole.pairwise).sum(axis=-1), 1, atol=1e-5)


def test_asking_for_every_token_gives_the_whole_distribution() -> None:
    drafter = make_drafter(make_dflash())
    observe(drafter, 0, make_taps(3, 10))
    found = drafter.propose([request(0, 10, num_candidates=500)])[0]
    assert found.width == VOCAB_SIZE
    np.testing.assert_allclose(np.exp(found.log_probs).sum(axis=1), 1, atol=1e-5)


def test_shared_noise_raises_agreement_with_the_target() -> None:
    """A target that differs a little from the drafter draws the drafter's token more often when both use its noise."""
    drafter = make_drafter(make_dflash())
    seen: list[Tensor] = []
    head = drafter.head
    drafter.head = lambda hidden: seen.append(head(hidden)) or seen[-1]  # type: ignore[func-returns-value]
    observe(drafter, 0, make_taps(8, 12))
    generator = torch.Generator().manual_seed(0)
    shared = argmax = 0
    for seed in range(40):
        params = SamplingParams(temperature=2.0, seed=seed)
        drafted = drafter.propose([request(0, 12, params=params)])[0].token_ids[:, 0]
        target_logits = seen[-1] + 0.3 * torch.randn(seen[-1].shape, generator=generator)
        sampled = choose_tokens(target_logits, params, range(13, 18)).numpy()
        shared += int((drafted == sampled).sum())
        argmax += int((seen[-1].argmax(-1).numpy() == sampled).sum())
    assert shared > 1.5 * argmax


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_reduced_head_is_the_full_head_restricted_to_its_ids(params: SamplingParams) -> None:
    kept = torch.tensor([3, 40, 8, 55, 21, 0, 33])
    reduced_model = make_dflash()
    reduced_model.draft_token_ids = kept
    reduced, full = make_drafter(reduced_model), make_drafter(make_dflash())
    for drafter in (reduced, full):
        observe(drafter, 2, make_taps(4, 6))
    ours = reduced.propose([request(2, 6, num_candidates=VOCAB_SIZE, params=params)])[0]
    theirs = full.propose([request(2, 6, num_candidates=VOCAB_SIZE, params=params)])[0]
    assert ours.width == len(kept)
    for row in range(ours.num_positions):
        is_kept = np.isin(theirs.token_ids[row], kept.numpy())
        np.testing.assert_array_equal(ours.token_ids[row], theirs.token_ids[row][is_kept])
        expected = theirs.log_probs[row][is_kept]
        expected = expected - np.log(np.exp(expected).sum())
        np.testing.assert_allclose(ours.log_probs[row], expected, rtol=1e-4, atol=1e-4)


def test_the_reduced_head_of_a_selector_scores_real_token_ids() -> None:
    """Codebooks are looked up by token id, not by row of the reduced head."""
    everything = make_dflash(is_second=True)
    permuted = make_dflash(is_second=True)
    permuted.draft_token_ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    drafters = [make_drafter(everything), make_drafter(permuted)]
    for drafter in drafters:
        observe(drafter, 0, make_taps(6, 5))
    first, second = (drafter.propose([request(0, 5)])[0] for drafter in drafters)
    assert_same(first, second, tolerance=1e-4)


@pytest.mark.parametrize("num_best", [1, 2])
def test_a_single_candidate_is_the_first_of_equals(num_best: int) -> None:
    """As in plain decoding and on a GPU."""
    scores = torch.zeros(1, 3, VOCAB_SIZE)
    scores[0, :, [5, 9, 30]] = 2.0
    _, ids, log_probs = make_drafter(make_dflash()).rank_tokens(scores, num_best)
    assert ids.shape == log_probs.shape == (1, 3, num_best)
    assert num_best > 1 or ids.flatten().tolist() == [5, 5, 5]
    assert torch.allclose(log_probs, scores.log_softmax(dim=-1).max())
