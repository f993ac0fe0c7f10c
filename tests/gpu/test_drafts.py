"""Drafts out of graphs are those of the CPU, step after step and request by request, in float32.

Texts cannot show a wrong draft: it is refused, and the text stays right.
"""

from typing import Any

import numpy as np
import pytest
import torch

from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.eagle3 import GpuEagle3Drafter
from tests.gpu.conftest import DEVICE
from tests.tiny import make_decoder, make_dflash, make_eagle3

pytestmark = pytest.mark.gpu
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "eagle3": (Eagle3Drafter, GpuEagle3Drafter),
    "dflash": (DFlashDrafter, GpuDFlashDrafter),
    "dflash2": (DFlashDrafter, GpuDFlashDrafter),
}


def make_drafter(kind: type[Any], name: str, device: torch.device) -> Any:
    model = make_eagle3() if name == "eagle3" else make_dflash(is_second=name == "dflash2")
    decoder = make_decoder().to(device)
    placement = Placement(num_slots=4, context_length=128, device=device, dtype=torch.float32)
    head = {} if name == "eagle3" else {"head": decoder.lm_head}
    return kind(model.to(device).eval().requires_grad_(False), placement, embed=decoder.embed_tokens, name=name, **head)


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(("name", "num_candidates"), [("eagle3", 1), ("dflash", 1), ("dflash", 4), ("dflash2", 5)])
def test_drafts_are_those_of_the_cpu(name: str, num_candidates: int, num_requests: int) -> None:
    kinds = KINDS[name]
    plain, planned = make_drafter(kinds[0], name, torch.device("cpu")), make_drafter(kinds[1], name, DEVICE)
    random, slots = np.random.default_rng(0), range(num_requests)
    taps = torch.from_numpy(random.normal(size=(64, plain.model.fc.in_features)).astype(np.float32))
    buffer = taps.to(DEVICE)
    planned.bind(buffer)
    lengths = [4 + slot for slot in slots]
    for drafter, all_taps in ((plain, taps), (planned, buffer)):
        drafter.observe([Observation(slot, [5] * lengths[slot], all_taps[: lengths[slot]]) for slot in slots])
    for step in range(8):
        requests = [
            DraftRequest(
                slot=slot, anchor_id=step + slot, position=lengths[slot], block_size=(4, 8)[step % 2] + slot,
                num_candidates=num_candidates, params=SamplingParams(),
            )
            for slot in slots
        ]  # fmt: skip
        for found, expected in zip(planned.propose(requests), plain.propose(requests), strict=True):
            np.testing.assert_array_equal(found.token_ids, expected.token_ids)
            for ours, theirs in ((found.log_probs, expected.log_probs), (found.first, expected.first)):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    np.testing.assert_allclose(ours, theirs, atol=1e-3)
            if found.pairwise is not None:
                np.testing.assert_allclose(found.pairwise, expected.pairwise, atol=1e-3)
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
