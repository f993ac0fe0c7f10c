"""Lookup as a drafter of its own; how it searches is tested with `Lookup`."""

import math

import numpy as np

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.ngram import NgramDrafter


def request(anchor_id: int, block_size: int = 5, slot: int = 0) -> DraftRequest:
    return DraftRequest(
        slot=slot, anchor_id=anchor_id, position=0, block_size=block_size, num_candidates=1, params=SamplingParams()
    )


def draft(drafter: NgramDrafter, anchor_id: int, block_size: int = 5, slot: int = 0) -> list[int]:
    return drafter.propose([request(anchor_id, block_size, slot)])[0].token_ids[:, 0].tolist()


def seen(*token_ids: int) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.observe([Observation(0, token_ids, None)])
    return drafter


def test_copies_what_followed() -> None:
    assert draft(seen(1, 2, 3, 4, 5, 6, 9), anchor_id=2) == [3, 4, 5, 6]


def test_nothing_seen_before_drafts_nothing() -> None:
    candidates = seen(1, 2, 3).propose([request(9)])[0]
    assert candidates.num_positions == 0
    assert NgramDrafter().propose([request(9)])[0].num_positions == 0


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
