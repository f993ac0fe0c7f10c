"""Replay must give the very steps that decoding takes: emitted lengths, block sizes, verify sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Asked, Choice, Drafted, Outcome, Pilot, PrefillState, Selection
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot, select_chains
from blockpilot.replay.simulate import (
    SimulatedStep,
    chain_step,
    oracle_request,
    oracle_steps,
    simulate,
    total,
    walk_chain,
)
from blockpilot.replay.traces import Trace
from tests.unit.replay.pieces import (
    SIZES,
    LinearCosts,
    MoodyPilot,
    WatchingPilot,
    decode,
    make_pair,
    milliseconds,
    run_collect,
    shapes,
)

PILOTS: list[Pilot] = [
    PlainPilot(),
    TreePilot(6, draft_size=8, num_candidates=5),
    TreePilot(40, num_candidates=3),
    TreePilot(2, draft_size=3, num_candidates=1),
    MoodyPilot(),
]


@pytest.mark.parametrize(
    ("is_second", "temperature"),
    [(False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0), (True, 4.0)],  # the hotter, the more shared noise agrees
)
def test_every_pilot_takes_the_steps_it_takes_online(is_second: bool, temperature: float, tmp_path: Path) -> None:
    llm = make_pair(is_second=is_second)
    traces = list(run_collect(llm, tmp_path, temperature=temperature, draft_sizes=SIZES))
    assert sum(trace.num_disagreements for trace in traces) == 0
    ties = 0
    for pilot in [*PILOTS, *map(FixedPilot, SIZES)]:
        online = decode(llm, pilot, temperature=temperature)
        assert [trace.answer_ids.tolist() for trace in traces] == [c.token_ids for c in online], pilot.name
        for trace, completion in zip(traces, online, strict=True):
            if shapes(simulate(trace, pilot)) != shapes(completion.steps):
                assert is_tie(trace, pilot, shapes(completion.steps)), (pilot.name, trace.prompt_id)
                ties += 1
    assert ties <= 1
    assert any(step.emitted > 1 for trace in traces for step in simulate(trace, FixedPilot(8)))


def is_tie(trace: Trace, pilot: Pilot, online: list[tuple[int, int, int]]) -> bool:
    """Whether scores that differ by rounding alone lead to the steps seen online."""
    random = np.random.default_rng(0)
    for _ in range(50):
        drafts = {}
        for size, draft in trace.drafts.items():
            scores = {name: getattr(draft, name) for name in ("log_probs", "first", "pairwise")}
            moved = {n: x + random.uniform(-1e-4, 1e-4, x.shape) for n, x in scores.items() if x is not None}
            drafts[size] = replace(draft, **moved)
        if shapes(simulate(replace(trace, drafts=drafts, setting=replace(trace.setting, sizes=())), pilot)) == online:
            return True
    return False


@pytest.mark.parametrize("is_second", [False, True])
def test_candidates_lead_a_chain_where_its_recorded_lengths_lead_it(is_second: bool, tmp_path: Path) -> None:
    """Two ways to the same walk: the lengths that were recorded, and the candidates as a pilot sees them."""
    llm = make_pair(is_second=is_second)
    for trace in run_collect(llm, tmp_path, temperature=1.0):
        unrecorded = replace(trace, setting=replace(trace.setting, sizes=()))
        for size in (3, 8):
            assert shapes(simulate(unrecorded, FixedPilot(size))) == shapes(walk_chain(trace, size))


def test_a_pilot_sees_what_it_sees_online(tmp_path: Path) -> None:
    llm = make_pair(num_slots=1)  # so that online, too, a batch is one request
    online, offline = MoodyPilot(), MoodyPilot()
    decode(llm, online)
    for trace in run_collect(llm, tmp_path):
        simulate(trace, offline)
    assert [mood.seen for mood in offline.started] == [mood.seen for mood in online.started]
    assert any(mood.seen for mood in online.started)


@dataclass
class Diary:
    """What a request has learnt, and how much of it was known at each choice."""

    outcomes: list[Outcome] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)  # as the inputs said
    choices: list[Choice] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[Outcome, Choice]]:
        return list(zip(self.outcomes, self.choices, strict=False))  # the last choice may have come to nothing


@dataclass
class DiaryPilot(Pilot):
    """Chooses from what it has learnt: another size whenever the last step was a surprise."""

    name: str = "diary"
    num_candidates: int = 1
    diaries: list[Diary] = field(default_factory=list)

    def start(self, prefill: PrefillState | None, neighbours: Sequence[Diary] = ()) -> Diary:
        self.diaries.append(Diary())
        return self.diaries[-1]

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [self._choose(diary, inputs.num_steps) for diary, inputs in requests]

    def _choose(self, diary: Diary, num_steps: int) -> Choice:
        diary.known.append(len(diary.outcomes))
        diary.num_steps.append(num_steps)
        diary.choices.append(Choice(8 if diary.outcomes and diary.outcomes[-1].emitted > 1 else 3))
        return diary.choices[-1]

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return select_chains(requests)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            outcome.memory.outcomes.append(outcome)


def test_on_a_device_choices_come_one_step_late(tmp_path: Path) -> None:
    """Step n + 1 is chosen while step n is in flight: with what came of the steps before n."""
    at_once, late = DiaryPilot(), DiaryPilot()
    traces = list(run_collect(make_pair(), tmp_path, temperature=1.0))
    for trace in traces:
        steps = simulate(trace, at_once)
        piped = simulate(trace, late, is_pipelined=True)
        assert sum(step.emitted for step in piped) == sum(step.emitted for step in steps) == trace.num_anchors
        now, behind = at_once.diaries[-1], late.diaries[-1]
        for diary, walk in ((now, steps), (behind, piped)):  # choices are taken in the order in which they are made
            drafted = [step.block_size for step in walk if step.block_size > 1]
            assert [choice.draft_size for choice in diary.choices][: len(drafted)] == drafted
            assert diary.known == diary.num_steps, "its inputs are as old as what it knows"
        assert now.known == list(range(len(now.known))) and len(now.choices) == len(now.outcomes)
        # one outcome less than steps before it, unless the step before may have been the last: none follows such a one
        is_followed = [outcome.inputs.num_remaining > choice.draft_size for outcome, choice in behind.pairs]
        expected = [0, *(number - is_late for number, is_late in enumerate(is_followed, start=1))]
        assert behind.known == expected[: len(behind.known)] and len(behind.choices) - len(behind.outcomes) <= 1
    assert max((diary.known for diary in late.diaries), key=len)[:4] == [0, 0, 1, 2]


def test_pilots_that_only_look_at_their_inputs_walk_alike_with_a_pipeline(tmp_path: Path) -> None:
    for trace in run_collect(make_pair(), tmp_path):
        for pilot in (PlainPilot(), FixedPilot(5), TreePilot(4, draft_size=8)):
            assert shapes(simulate(trace, pilot, is_pipelined=True)) == shapes(simulate(trace, pilot))


def test_the_prefill_is_rebuilt_up_to_its_mass(tmp_path: Path) -> None:
    llm = make_pair()
    for trace in run_collect(llm, tmp_path, count=2):
        kept = trace.prefill
        assert 1 - 1e-4 <= kept.mass <= 1 + 1e-6 and (np.diff(kept.probabilities) <= 0).all()
        state = trace.prefill_state()
        assert state.probabilities.shape == (61,) and state.hidden.shape == (32,)
        assert float(state.probabilities.sum()) == pytest.approx(kept.mass)
        entropy = -(kept.probabilities * np.log(kept.probabilities)).sum()
        assert kept.entropy == pytest.approx(entropy, abs=2e-3)


def test_whole_logits_are_those_that_a_pilot_sees_online(tmp_path: Path) -> None:
    llm, pilot = make_pair(), WatchingPilot()
    traces = list(run_collect(llm, tmp_path, whole_logits=True))
    decode(llm, pilot)
    for trace, online in zip(traces, pilot.seen, strict=True):
        state = trace.prefill_state()
        assert state.logits is not None and online.logits is not None
        torch.testing.assert_close(state.logits, online.logits)
        torch.testing.assert_close(state.probabilities, online.probabilities)


def test_sizes_that_were_not_recorded_are_named(tmp_path: Path) -> None:
    trace = next(iter(run_collect(make_pair(), tmp_path, count=1)))
    with pytest.raises(InputError, match=r"no candidates of draft size 5; it holds 3, 8"):
        simulate(trace, TreePilot(4, draft_size=5))
    with pytest.raises(InputError, match=r"no candidates of draft size 9; it holds 3, 8"):
        simulate(trace, FixedPilot(9))
    with pytest.raises(InputError, match=r"no block size 9; it holds 2, 3, 5, 8, 13"):
        walk_chain(trace, 9)


def test_oracles_beat_every_fixed_size(tmp_path: Path) -> None:
    costs = LinearCosts()
    for trace in run_collect(make_pair(), tmp_path, max_new_tokens=12):
        fixed = {size: milliseconds(walk_chain(trace, size, costs)) for size in (1, *SIZES)}
        size, walk = oracle_request(trace, (1, *SIZES), costs)
        assert milliseconds(walk) == min(fixed.values()) == fixed[size]
        steps = oracle_steps(trace, costs)
        assert sum(step.emitted for step in steps) == trace.num_anchors
        assert milliseconds(steps) <= min(fixed.values()) + 1e-9


def test_the_step_oracle_is_the_best_of_all_ways(tmp_path: Path) -> None:
    costs = LinearCosts()
    trace = next(iter(run_collect(make_pair(), tmp_path, count=1, max_new_tokens=7)))
    ways = product((1, 2, 5), repeat=trace.num_anchors)
    cheapest = min(milliseconds(walk_sizes(trace, sizes, costs)) for sizes in ways)
    assert milliseconds(oracle_steps(trace, costs, sizes=(2, 5))) == pytest.approx(cheapest)


def walk_sizes(trace: Trace, sizes: Sequence[int], costs: LinearCosts) -> list[SimulatedStep]:
    """A chain whose size is set anchor by anchor."""
    steps: list[SimulatedStep] = []
    anchor = 0
    while anchor < trace.num_anchors:
        steps.append(chain_step(trace, sizes[anchor], anchor, costs=costs))
        anchor += steps[-1].emitted
    return steps


def test_a_request_that_never_drafts_is_spared_the_overhead(tmp_path: Path) -> None:
    free = StepCosts.linear(slope=0.5)
    costs = StepCosts(free.draft, free.verify, overhead_ms=2.0)
    trace = next(iter(run_collect(make_pair(), tmp_path, count=1)))
    plain = milliseconds(simulate(trace, PlainPilot(), free))
    assert milliseconds(simulate(trace, PlainPilot(), costs)) == milliseconds(walk_chain(trace, 1, costs)) == plain
    for pilot in (FixedPilot(5), TreePilot(4, draft_size=8), MoodyPilot()):
        steps = simulate(trace, pilot, costs)
        more = 2.0 * sum(step.block_size > 1 for step in steps)  # what plain steps bring is looked at with a draft's
        assert milliseconds(steps) == pytest.approx(milliseconds(simulate(trace, pilot, free)) + more)
    assert milliseconds(oracle_steps(trace, costs)) <= plain


def test_totals_pool_all_requests(tmp_path: Path) -> None:
    traces = list(run_collect(make_pair(), tmp_path))
    walks = [simulate(trace, FixedPilot(5), LinearCosts()) for trace in traces]
    sums = total(walks)
    assert sums.emitted == sum(trace.num_anchors for trace in traces) and sums.num_steps == sum(map(len, walks))
    assert sums.tau == sums.emitted / sums.num_steps
    assert sums.tokens_per_second == pytest.approx(1e3 * sums.emitted / sum(map(milliseconds, walks)))
    assert total([]).tau == total([]).tokens_per_second == 0
