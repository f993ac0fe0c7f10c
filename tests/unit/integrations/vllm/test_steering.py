from dataclasses import dataclass

import numpy as np
import pytest

from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import Choice, Outcome, Pilot, Selection
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot, PlainPilot
from blockpilot.pilots.step import StepPilot
from tests.unit.integrations.vllm.pieces import NUM_DRAFT_TOKENS, make_row, make_steering


@dataclass
class RecordingPilot(Pilot):
    """Notes what it is told."""

    size: int = 5
    num_kept: int = 2
    name: str = "recording"
    num_candidates: int = 1
    wants_prefill: bool = False

    def __post_init__(self):
        self.inputs, self.drafts, self.outcomes, self.prefill = [], [], [], None

    @property
    def reads_prefill(self):
        return self.wants_prefill

    def start(self, prefill, neighbours=()):
        self.prefill = prefill
        return "memory"

    def choose(self, requests):
        assert [memory for memory, _ in requests] == ["memory"] * len(requests)
        self.inputs += [inputs for _, inputs in requests]
        return [Choice(self.size)] * len(requests)

    def select(self, requests):
        self.drafts += [one.draft for one in requests]
        chains = [DraftTree.chain(one.anchor_id, one.draft.token_ids[: self.num_kept, 0].tolist()) for one in requests]
        return [Selection(chain, 1.5, [0.75]) for chain in chains]

    def learn(self, outcomes):
        self.outcomes += outcomes


def choose(steering, rows, **options):
    return steering.choose(
        rows, read_prefill=lambda index: f"state of row {index}", known_ids={"a", "b", "c"}, **options
    )


def drafts(num_rows, count):
    return np.arange(num_rows * count).reshape(num_rows, count)


def test_a_batch_drafts_what_its_largest_choice_needs_and_each_request_checks_its_own_part():
    steering = make_steering(FixedPilot(3), small=FixedPilot(2), plain=PlainPilot())
    rows = [make_row("a"), make_row("b", override="small"), make_row("c", override="plain")]
    assert choose(steering, rows) == 2
    assert steering.select(rows, drafts(3, 2), None) == [[0, 1], [2], []]


def test_nothing_is_drafted_where_nobody_wants_to():
    steering = make_steering(PlainPilot())
    assert choose(steering, [make_row()]) == 0
    assert steering.select([make_row()], drafts(1, 0), None) == [[]]


def test_requests_still_reading_their_prompt_do_not_take_part():
    pilot = RecordingPilot()
    steering = make_steering(pilot)
    rows = [make_row("a", is_waiting=True), make_row("b")]
    assert choose(steering, rows) == 4
    assert steering.select(rows, drafts(2, 4), np.zeros((2, 4), np.float32)) == [[], [4, 5]]
    assert [inputs.batch_size for inputs in pilot.inputs] == [1] and set(steering.requests) == {"b"}


def test_a_pilot_is_told_what_our_engine_would_tell_it():
    pilot = RecordingPilot()
    steering = make_steering(pilot)
    row = make_row(temperature=0.5)
    choose(steering, [row])
    steering.select([row], drafts(1, 4), np.full((1, 4), -0.5, np.float32))
    row = make_row(num_answer_tokens=4, num_emitted=3)
    choose(steering, [row])
    first, second = pilot.inputs
    assert (first.num_steps, first.context_length, first.num_remaining) == (0, 10, 99)
    assert (first.max_block_size, first.trained_block_size, first.temperature) == (NUM_DRAFT_TOKENS + 1, 8, 0.5)
    assert (second.num_steps, second.context_length, second.num_remaining) == (1, 13, 96)
    assert pilot.drafts[0].token_ids.tolist() == [[0], [1], [2], [3]]
    assert pilot.drafts[0].log_probs.tolist() == [[-0.5]] * 4
    assert pilot.outcomes == [Outcome("memory", first, depth=2, promised=1.5, head=[0.75], emitted=3)]


def test_a_step_without_a_draft_teaches_nothing():
    pilot = RecordingPilot()
    steering = make_steering(pilot)
    for number in range(3):
        row = make_row(num_answer_tokens=1 + number)
        choose(steering, [row], limit=0 if number == 1 else None)
        if number == 0:
            steering.select([row], drafts(1, 4), np.zeros((1, 4), np.float32))
    assert [(outcome.inputs.num_steps, outcome.emitted) for outcome in pilot.outcomes] == [(0, 1)]


def test_prefill_is_read_for_pilots_that_look_at_it():
    curious, other = RecordingPilot(wants_prefill=True), RecordingPilot()
    steering = make_steering(other, curious=curious)
    choose(steering, [make_row("a"), make_row("b", override="curious")])
    assert curious.prefill == "state of row 1" and other.prefill is None


def test_drafts_end_where_the_answer_must_end():
    steering = make_steering(FixedPilot(6))
    row = make_row(num_answer_tokens=97)
    assert choose(steering, [row]) == 5
    assert steering.select([row], drafts(1, 5), None) == [[0, 1]]  # of three more tokens the last comes for free
    assert choose(steering, [make_row(num_answer_tokens=99)]) == 0


def test_vllms_own_schedule_bounds_the_draft():
    steering = make_steering(FixedPilot(6))
    assert choose(steering, [make_row()], limit=2) == 2
    assert choose(steering, [make_row(num_answer_tokens=2)], limit=0) == 0


def test_a_draft_made_larger_for_a_neighbour_is_seen_whole_by_pilots_that_weigh_it():
    pilot = RecordingPilot(size=3)
    steering = make_steering(FixedPilot(8), small=pilot)
    rows = [make_row("a"), make_row("b", override="small")]
    choose(steering, rows)
    steering.select(rows, drafts(2, 7), np.zeros((2, 7), np.float32))
    assert pilot.drafts[0].num_positions == 7


def test_the_adaptive_pilot_checks_more_of_a_draft_that_is_sure_of_itself():
    pilot = StepPilot(Calibration.identity(), StepCosts.linear(slope=0.1), is_chain=True, draft_sizes=(8,))
    steering = make_steering(pilot)
    rows = [make_row("a"), make_row("b")]
    assert choose(steering, rows) == 7 and steering.wants_scores
    log_probs = np.log(np.array([[0.99] * 7, [0.6] * 7], dtype=np.float32))
    sure, unsure = steering.select(rows, drafts(2, 7), log_probs)
    assert len(sure) == 7 and 0 < len(unsure) < 4


def test_fixed_sizes_need_no_scores():
    steering = make_steering(FixedPilot(4))
    choose(steering, [make_row()])
    assert not steering.wants_scores


def test_finished_requests_are_forgotten():
    steering = make_steering(FixedPilot(4))
    choose(steering, [make_row("a"), make_row("b")])
    steering.choose([make_row("b")], read_prefill=None, known_ids={"b"})
    assert set(steering.requests) == {"b"}


@dataclass
class RaisingPilot(RecordingPilot):
    stage: str = ""

    def fail_in(self, stage):
        if self.stage == stage:
            raise RuntimeError(f"broken in {stage}")

    def start(self, prefill, neighbours=()):
        self.fail_in("start")
        return super().start(prefill, neighbours)

    def choose(self, requests):
        self.fail_in("choose")
        return super().choose(requests)

    def select(self, requests):
        self.fail_in("select")
        return super().select(requests)

    def learn(self, outcomes):
        self.fail_in("learn")


@pytest.mark.parametrize("stage", ["start", "choose", "select", "learn"])
def test_a_request_whose_pilot_fails_goes_on_at_the_configured_size(stage, caplog):
    steering = make_steering(FixedPilot(3), bad=RaisingPilot(stage=stage))
    for step in range(3):
        rows = [make_row("a", num_answer_tokens=1 + step), make_row("b", num_answer_tokens=1 + step, override="bad")]
        count = choose(steering, rows)
        good, bad = steering.select(rows, drafts(2, count), np.zeros((2, count), np.float32))
        assert len(good) == 2 and len(bad) == (2 if stage == "learn" and step == 0 else count)
    assert count == NUM_DRAFT_TOKENS
    assert [f"broken in {stage}" in record.message for record in caplog.records] == [True]


def test_a_draft_without_probabilities_is_checked_as_configured(caplog):
    steering = make_steering(RecordingPilot())
    row = make_row()
    count = choose(steering, [row])
    assert len(steering.select([row], drafts(1, count), None)[0]) == count
    assert "shows no probabilities" in caplog.text


def test_a_bad_override_does_not_hide_a_failure_of_the_configured_pilot(caplog):
    steering = make_steering(RaisingPilot(stage="choose"))
    rows = [make_row("a", override="unknown"), make_row("b"), make_row("c", override="unknown")]
    assert choose(steering, rows) == NUM_DRAFT_TOKENS
    assert len(caplog.records) == 2 and "asked for" in caplog.records[0].message
