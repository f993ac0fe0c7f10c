"""How likely copies are, and how much of one is worth a check."""

import numpy as np
import pytest

from blockpilot.core.draft import MAX_MATCH, NO_DRAFT, Copy
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.pilots.base import PLAIN, Asked, Drafted
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.copies import MAX_COPIED, best_prefix, weigh_copy
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.memory import StepMemory
from blockpilot.pilots.step import COPIED, StepPilot
from tests.tiny import make_dflash, make_llm
from tests.unit.pilots.pieces import make_inputs, random_draft

COSTS = StepCosts.linear(draft=0.3, slope=0.15)


def make_copy(num_matched: int = 4, right: float = 0.0, seen: float = 0.0, size: int = 8) -> Copy:
    return Copy(list(range(30, 30 + size)), num_matched, right, seen)


def first(copy: Copy, temperature: float = 0.0) -> float:
    return weigh_copy(copy, temperature, [1.0], 1).probabilities[0]


def test_long_matches_and_copies_that_came_true_are_trusted() -> None:
    assert first(make_copy(1)) < first(make_copy(2)) < first(make_copy(8)) < first(make_copy(MAX_MATCH))
    assert first(make_copy(4, 0, 6)) < first(make_copy(4, 3, 6)) < first(make_copy(4, 6, 6))
    assert first(make_copy(), 1.0) < first(make_copy()), "noise breaks copies"
    found = weigh_copy(make_copy(3, size=MAX_COPIED), 0.0, [1.0], 1).probabilities
    assert (np.diff(found) >= 0).all() and 0 < min(found) < max(found) < 1, "further tokens agree with more before them"


def test_as_much_of_a_copy_is_checked_as_pays() -> None:
    check_ms = [1 + 0.2 * count for count in range(10)]
    assert best_prefix([0.9] * 4, check_ms, 9)[0] == 4
    count, rate, promised = best_prefix([0.9, 0.9, 0.1, 0.9], check_ms, 9)
    assert (count, promised) == (2, pytest.approx(0.9 + 0.81))
    assert rate == pytest.approx((1 + promised) / 1.4)
    assert best_prefix([0.05] * 4, check_ms, 9) == (0, 1.0, 0.0)
    assert best_prefix([0.9] * 4, check_ms, 2)[0] == 2, "as the answer ends"
    assert best_prefix([], check_ms, 9) == best_prefix([0.9], check_ms, 0) == (0, 1.0, 0.0)
    found = weigh_copy(make_copy(16, 9, 9), 0.0, check_ms, 9)
    assert found[2:] == best_prefix(found.probabilities, check_ms, 9)


def choose(copy: Copy | None, memory: StepMemory, **changes: object) -> tuple[StepPilot, bool]:
    pilot = StepPilot(Calibration.identity(), COSTS, reads_copies=True)
    inputs = make_inputs(copy=copy, **changes)
    return pilot, pilot.choose([Asked(memory, inputs)])[0] is COPIED


def test_a_good_copy_needs_no_draft() -> None:
    good, bad = make_copy(16, 9, 9, size=16), make_copy(1, 0, 9)
    assert choose(good, StepMemory())[1] and not choose(bad, StepMemory())[1] and not choose(None, StepMemory())[1]
    closed = StepMemory()
    closed.gate.is_closed = True
    assert choose(good, closed)[1], "also where drafting does not pay"
    assert not choose(good, StepMemory(rate=9.0))[1], "not where drafting brings more"
    pilot = StepPilot(Calibration.identity(), COSTS, reads_copies=True)
    inputs = make_inputs(copy=good, max_block_size=1)
    assert pilot.choose([Asked(StepMemory(), inputs)])[0] is COPIED, "without a drafter copies are all there is"
    assert pilot.choose([Asked(StepMemory(), inputs._replace(copy=bad))])[0] == PLAIN


def test_a_copy_is_checked_as_a_chain_and_beside_a_draft_as_a_branch() -> None:
    pilot = StepPilot(Calibration.identity(), COSTS, reads_copies=True)
    inputs, memory = make_inputs(copy=make_copy(16, 9, 9, size=12)), StepMemory()
    alone = pilot.select([Drafted(memory, inputs, COPIED, NO_DRAFT, 9)])[0]
    assert alone.tree.is_chain and 2 < len(alone.tree) <= 13
    assert alone.tree.token_ids[1:] == tuple(range(30, 29 + len(alone.tree))) and alone.promised > 1
    last = pilot.select([Drafted(memory, inputs._replace(num_remaining=3), COPIED, NO_DRAFT, 9)])[0]
    assert len(last.tree) <= 3, "no deeper than the answer reaches"
    draft = random_draft(0, depth=7, width=4, is_pairwise=True)
    both = pilot.select([Drafted(memory, inputs, pilot.options(8)[0]._replace(num_nodes=None), draft, 9)])[0]
    assert 30 in both.tree.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_that_repeat_themselves_are_copied_and_stay_the_same(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1, ignore_eos=True)
    prompts = ["abcdefgh abcdefgh abcdefgh", "the quick brown fox", "zzzz"]
    llm = make_llm(drafter=make_dflash(is_second=True), costs=COSTS)
    plain = llm.generate(prompts, params, pilot="ar", is_raw=True)
    found = llm.generate(prompts, params, pilot="auto", is_raw=True)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    if temperature == 0:
        steps = [step for answer in found for step in answer.steps]
        copied = [step for step in steps if step.block_size == 1 < step.verify_size]
        assert sum(step.emitted for step in copied) > len(copied) > 0
