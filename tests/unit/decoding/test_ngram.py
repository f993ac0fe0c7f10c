"""Prompt lookup: what followed the last time the same words stood there."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.ngram import NgramDrafter


def request(anchor_id: int, block_size: int = 5, slot: int = 0) -> DraftRequest:
    return DraftRequest(
        slot=slot, anchor_id=anchor_id, position=0, block_size=block_size, num_candidates=1, params=SamplingParams()
    )


def draft(drafter: NgramDrafter, anchor_id: int, block_size: int = 5, slot: int = 0) -> list[int]:
    return drafter.propose([request(anchor_id, block_size, slot)])[0].token_ids[:, 0].tolist()


def seen(*token_ids: int, max_ngram: int = 3) -> NgramDrafter:
    drafter = NgramDrafter(max_ngram)
    drafter.observe([Observation(0, token_ids, None)])
    return drafter


def naive_lookup(history: list[int], max_ngram: int, count: int) -> list[int]:
    """Search the whole history, longest n-gram first, latest occurrence first."""
    for size in range(min(max_ngram, len(history)), 0, -1):
        for end in range(len(history) - 1, size - 1, -1):
            if history[end - size : end] == history[-size:]:
                return history[end : end + count]
    return []


def test_copies_what_followed() -> None:
    assert draft(seen(1, 2, 3, 4, 5, 6, 9), anchor_id=2) == [3, 4, 5, 6]


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    assert draft(seen(1, 2, 3, 7, 8, 3, 9, 1, 2), anchor_id=3, block_size=3) == [7, 8]


def test_the_latest_of_equal_matches_wins() -> None:
    assert draft(seen(5, 1, 6, 5, 2, 6, 8), anchor_id=5, block_size=2) == [2]


def test_nothing_seen_before_drafts_nothing() -> None:
    candidates = seen(1, 2, 3).propose([request(9)])[0]
    assert candidates.num_positions == 0
    assert NgramDrafter().propose([request(9)])[0].num_positions == 0


def test_the_copy_may_run_into_the_anchor_itself() -> None:
    assert draft(seen(7, 4), anchor_id=7, block_size=8) == [4, 7]


def test_scores_are_probabilities() -> None:
    candidates = seen(1, 2, 3, 1).propose([request(2)])[0]
    assert candidates.log_probs.shape == candidates.token_ids.shape
    assert (candidates.log_probs < 0).all() and np.isfinite(candidates.log_probs).all()
    assert math.exp(candidates.log_probs[0, 0]) < 1


def test_slots_are_kept_apart_and_forgotten() -> None:
    drafter = NgramDrafter()
    drafter.observe([Observation(0, [1, 2, 3], None), Observation(1, [1, 5, 6], None)])
    assert draft(drafter, 1, 2, slot=0) == [2]
    assert draft(drafter, 1, 2, slot=1) == [5]
    drafter.forget(0)
    assert draft(drafter, 1, 2, slot=0) == []
    assert draft(drafter, 1, 2, slot=1) == [5]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(2, 9), st.data())
def test_equals_a_search_through_the_history(
    history: list[int], max_ngram: int, block_size: int, data: st.DataObject
) -> None:
    drafter = NgramDrafter(max_ngram)
    cut = data.draw(st.integers(0, len(history) - 1))
    drafter.observe([Observation(0, history[:cut], None)])
    drafter.observe([Observation(0, history[cut:-1], None)])
    assert draft(drafter, history[-1], block_size) == naive_lookup(history, max_ngram, block_size - 1)
