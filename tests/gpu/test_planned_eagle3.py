"""EAGLE-3 chains out of a graph are those of the CPU, step after step, in float32."""

from typing import Any

import numpy as np
import pytest
import torch

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.decoding.planned_eagle3 import PlannedEagle3Drafter
from tests.gpu.conftest import DEVICE
from tests.tiny import make_decoder, make_eagle3

pytestmark = pytest.mark.gpu


def make_drafter(kind: type[Eagle3Drafter], device: torch.device) -> Eagle3Drafter:
    model = make_eagle3().to(device).eval().requires_grad_(False)
    embed = make_decoder().embed_tokens.to(device)
    options: dict[str, Any] = {"num_slots": 4, "context_length": 128, "device": device, "dtype": torch.float32}
    return kind(model, embed=embed, **options)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_chains_are_those_of_the_cpu(num_requests: int) -> None:
    plain, planned = make_drafter(Eagle3Drafter, torch.device("cpu")), make_drafter(PlannedEagle3Drafter, DEVICE)
    random, slots = np.random.default_rng(0), range(num_requests)
    taps = torch.from_numpy(random.normal(size=(64, plain.model.fc.in_features)).astype(np.float32))
    buffer = taps.to(DEVICE)
    lengths = [4 + slot for slot in slots]
    for drafter, all_taps in ((plain, taps), (planned, buffer)):
        drafter.observe([Observation(slot, [5] * lengths[slot], all_taps[: lengths[slot]]) for slot in slots])
    for step in range(8):
        requests = [
            DraftRequest(
                slot=slot, anchor_id=step + slot, position=lengths[slot], block_size=(4, 8)[step % 2] + slot,
                num_candidates=1, params=SamplingParams(),
            )
            for slot in slots
        ]  # fmt: skip
        for found, expected in zip(planned.propose(requests), plain.propose(requests), strict=True):
            np.testing.assert_array_equal(found.token_ids, expected.token_ids)
            np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-3)
        counts = random.integers(1, 9, size=num_requests).tolist()
        taps.copy_(torch.from_numpy(random.normal(size=taps.shape)))
        buffer.copy_(taps)
        for drafter, all_taps in ((plain, taps), (planned, buffer)):
            drafter.observe(
                [
                    Observation(
                        slot, list(range(step, step + counts[slot])), all_taps, range(slot, slot + counts[slot])
                    )
                    for slot in slots
                ]
            )
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
