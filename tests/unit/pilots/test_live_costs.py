"""Costs that follow the machine: they find it behind a wrong profile, and are not led astray by a busy moment."""

import random

import pytest

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine import llm as llm_module
from blockpilot.engine.llm import LLM
from blockpilot.pilots.cost_model import CostPoint, StepCosts, StepTables
from blockpilot.pilots.live_costs import REFRESH, LiveCosts, MeasuredStep
from tests.tiny import make_dflash, make_llm

TRUE_CHECK = {1: 3.1, 2: 3.4, 4: 3.8, 8: 5.2, 16: 8.5, 32: 15.0}
WRONG_CHECK = {1: 3.4, 2: 6.5, 4: 8.3, 8: 8.7, 16: 13.9, 32: 23.0}  # measured while others had the machine
DRAFT = {4: 0.9, 8: 1.2, 16: 2.0}


def costs(checks: dict[int, float]) -> StepCosts:
    drafts = tuple(CostPoint(size, ms) for size, ms in DRAFT.items())
    return StepCosts(drafts, tuple(CostPoint(tokens, ms) for tokens, ms in checks.items()))


def take_steps(live: LiveCosts, count: int, check_sizes: list[int], *, speed: float = 1.0, noise: float = 0.1) -> None:
    truth, chance = costs(TRUE_CHECK), random.Random(0)
    for _ in range(count):
        tokens = chance.choice(check_sizes)
        drafts = [8] if tokens > 1 else []
        spread = chance.lognormvariate(0, noise)
        spread *= 5 if chance.random() < 0.02 else 1  # somebody else's turn
        live.note(
            MeasuredStep(drafts, [tokens], 200, truth.draft_ms(8) * speed, truth.verify_ms(tokens) * speed * spread)
        )


def test_a_wrong_profile_is_put_right_where_steps_were_taken_and_near_it() -> None:
    live = LiveCosts(costs(WRONG_CHECK))
    take_steps(live, 60, [1, 7, 8])
    for tokens in (1, 7, 8):
        assert live.current.verify_ms(tokens) == pytest.approx(costs(TRUE_CHECK).verify_ms(tokens), rel=0.15)
    assert live.current.verify_ms(16) < 0.8 * live.profile.verify_ms(16), "an octave further the same error is likely"
    assert live.profile == costs(WRONG_CHECK)


def test_a_machine_that_slows_down_as_a_whole_changes_no_ratio_for_long() -> None:
    live = LiveCosts(costs(TRUE_CHECK))
    take_steps(live, 200, [1, 4, 8, 16], speed=2.0)
    slow, before = live.current, live.profile
    for tokens in (4, 8, 16):
        ratio = slow.verify_ms(tokens) / slow.verify_ms(1)
        assert ratio == pytest.approx(before.verify_ms(tokens) / before.verify_ms(1), rel=0.1)
    assert slow.draft_ms(8) == pytest.approx(2 * before.draft_ms(8), rel=0.1)


def test_a_good_profile_stays_and_pilots_are_seldom_told() -> None:
    live = LiveCosts(costs(TRUE_CHECK))
    take_steps(live, 100 * REFRESH, [1, 4, 8], noise=0.05)
    assert live.version < 40
    for tokens in (1, 4, 8):
        assert live.current.verify_ms(tokens) == pytest.approx(TRUE_CHECK[tokens], rel=0.1)


def test_one_long_pause_teaches_little() -> None:
    live = LiveCosts(costs(TRUE_CHECK))
    take_steps(live, 2 * REFRESH, [8], noise=0.0)
    for _ in range(REFRESH):
        live.note(MeasuredStep([8], [8], 200, 1.2, 900.0 if _ == 3 else TRUE_CHECK[8]))
    assert live.current.verify_ms(8) < 1.1 * TRUE_CHECK[8]


def test_batches_count_with_all_their_tokens() -> None:
    live = LiveCosts(costs(TRUE_CHECK))
    for _ in range(4 * REFRESH):
        live.note(MeasuredStep([8, 8], [6, 10], 200, 3.0, 2 * live.profile.verify_ms(8, 2, 200)))
    assert live.current.verify_ms(8, 2) == pytest.approx(2 * live.profile.verify_ms(8, 2), rel=0.1)


def test_tables_are_made_anew_when_costs_have_changed() -> None:
    live = LiveCosts(costs(WRONG_CHECK))
    tables = StepTables(live, (4, 8), 15)
    before = tables.at(1, 100)
    assert tables.at(1, 100) is before
    take_steps(live, 60, [1, 8])
    assert tables.at(1, 100).step_ms[1, 7] < 0.8 * before.step_ms[1, 7]


def test_an_engine_tells_its_pilots_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "ensure_costs", lambda llm: costs(WRONG_CHECK))
    llm: LLM = make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), costs=None, context_length=256)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    texts = {pilot: llm.generate("hello", params, pilot=pilot).token_ids for pilot in ("ar", "auto", "fixed:4")}
    assert texts["auto"] == texts["ar"] == texts["fixed:4"]
    live = llm.engine.pipeline.loop.live_costs
    assert live is not None and live.version and live.current != live.profile == llm.costs


def test_costs_that_were_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(drafter=make_dflash(), costs=costs(TRUE_CHECK))
    llm.generate("abc", SamplingParams(max_new_tokens=12, ignore_eos=True), pilot="auto", is_raw=True)
    assert llm.engine.pipeline.loop.live_costs is None and llm.costs == costs(TRUE_CHECK)
