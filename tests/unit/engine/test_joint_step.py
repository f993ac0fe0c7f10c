"""Steps that a device takes alone emit what the host's would. Here with the kernels' reference implementation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockpilot import load_pilot
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding import planned_dflash
from blockpilot.decoding.drafter import DraftRequest
from blockpilot.engine import step_timing
from blockpilot.engine.joint_step import JointFlight, JointStep
from blockpilot.engine.llm import LLM
from blockpilot.engine.plain_step import PlainFlight, PlainRequest, PlainStep
from blockpilot.engine.planned_runner import PlannedRunner
from blockpilot.engine.step_timing import ProfilePlan, time_steps
from blockpilot.models.gpu import Stopwatch
from blockpilot.pilots.base import Ahead
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.step import StepPilot
from tests.tiny import make_dflash, make_llm
from tests.unit.engine.late_device import Runs, device  # noqa: F401
from tests.unit.engine.test_planned import PROMPTS, make_planned

PADDED = replace(StepCosts.linear(draft=0.05, slope=0.01), padding=PlannedRunner.padding)
SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=30),
    "T=0.7": SamplingParams(max_new_tokens=30, temperature=0.7, seed=3),
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    counted, start, follow = Runs(), JointStep.start, JointStep.follow

    def count(self: JointStep, requests: Sequence[DraftRequest], ahead: Ahead) -> JointFlight:
        counted.append(len(requests))
        counted.ahead.append(False)
        return start(self, requests, ahead)

    def count_ahead(
        self: JointStep, flight: JointFlight, ahead: Ahead, positions: Sequence[int | None]
    ) -> JointFlight | None:
        following = follow(self, flight, ahead, positions)
        if following is not None:
            counted.append(len(positions) - positions.count(None))
            counted.ahead.append(True)
        return following

    monkeypatch.setattr(JointStep, "start", count)
    monkeypatch.setattr(JointStep, "follow", count_ahead)
    return counted


def build(*, is_second: bool = True, is_joint: bool = True, name: str = "qwen3", **options: object) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        llm = make_planned(patch, name, drafter=make_dflash(name, is_second=is_second), **options)
    assert llm.engine.joint is not None
    if not is_joint:
        llm.engine.joint = None
    return llm


def emitted(answers: Sequence[Completion]) -> list[list[int]]:
    return [[step.emitted for step in answer.steps] for answer in answers]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_answers_are_plain_decodings(runs: Runs, name: str, is_second: bool, sampling: str) -> None:
    llm, host = build(name=name, is_second=is_second), build(name=name, is_second=is_second, is_joint=False)
    params = SAMPLING[sampling]
    plain = [answer.token_ids for answer in llm.generate(PROMPTS, params, pilot="ar", is_raw=True)]
    assert not runs
    for pilot in ("fixed:4", "fixed:16", "tree:15", "tree:70"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == plain
        assert max(runs, default=0) == len(PROMPTS) or (name, pilot) == ("qwen3_moe", "tree:70")  # too many rows
        runs.clear()
        expected = host.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert not runs
        if pilot.startswith("fixed"):
            assert emitted(found) == emitted(expected)
        else:  # where paths are nearly equal, other nodes may be taken
            ours, theirs = (sum(map(len, emitted(answers))) for answers in (found, expected))
            assert ours == pytest.approx(theirs, rel=0.1)
            assert all(answer.steps[0].verify_size == int(pilot[5:]) + 1 for answer in found)
    assert llm.engine.runner.cache.num_free == 4


class WatchedPilot(StepPilot):
    """Remembers the pilots of its requests."""

    started: list[StepPilot]

    def start(self, prefill: object) -> StepPilot:
        self.started.append(super().start(None))  # a list that copies share
        return self.started[-1]


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_adaptive_pilots_learn_as_on_the_host(runs: Runs, num_prompts: int) -> None:
    sizes, memories = [], []
    for is_joint in (True, False):
        llm, pilot = build(is_joint=is_joint, costs=PADDED), WatchedPilot(Calibration.identity(), PADDED)
        pilot.started = []
        found = llm.generate(PROMPTS[:num_prompts], SAMPLING["greedy"], pilot=[pilot] * num_prompts, is_raw=True)
        plain = llm.generate(PROMPTS[:num_prompts], SAMPLING["greedy"], pilot="ar", is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        chosen = [[(one.block_size, one.verify_size) for one in answer.steps[:6]] for answer in found]
        sizes.append([list(dict.fromkeys(each))[:2] for each in chosen])  # a step behind another decides one step later
        first = pilot.started[0]
        recent = first.recent if num_prompts == 1 else first._together.recent
        memories.append((recent.average, recent.expected, recent.promised, recent.kept))
    assert bool(runs) and sizes[0] == sizes[1]
    assert memories[0] == pytest.approx(memories[1], rel=0.1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_short_answers_end_where_they_should(runs: Runs, num_tokens: int) -> None:
    llm = build()
    params = [SamplingParams(max_new_tokens=num_tokens + index, ignore_eos=True) for index in range(4)]
    plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
    for pilot in ("fixed:8", "tree:20"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert runs


def test_what_the_device_cannot_do_goes_the_hosts_way(runs: Runs) -> None:
    llm = build(costs=StepCosts.linear(draft=0.05, slope=0.01))
    filtered = SamplingParams(max_new_tokens=12, temperature=1.0, top_k=5, seed=1)
    mixed = ["fixed:4", "tree:7", "ar", "fixed:4"]
    for params, pilot in [(filtered, "tree:7"), (SAMPLING["greedy"], "step"), (SAMPLING["greedy"], mixed)]:
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert not runs or (pilot is mixed and set(runs) <= {1, 2})  # when only requests of one kind are left


def test_other_drafters_and_devices_have_no_joint_steps() -> None:
    assert make_llm("qwen3", drafter=make_dflash("qwen3")).engine.joint is None
    assert make_llm("qwen3", drafter="ngram").engine.joint is None


@pytest.mark.usefixtures("device")
def test_a_request_may_leave_while_its_step_is_on_its_way(runs: Runs) -> None:
    llm = build()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPTS[1], params, pilot="tree:15", is_raw=True)
    engine = llm.engine
    ids = [engine.add_request(llm.tokenizer.encode(text), params, load_pilot("tree:15")) for text in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    assert engine.abort(ids[0]) is not None and engine.runner.cache.num_free == 3
    third = engine.add_request(llm.tokenizer.encode(PROMPTS[1]), params, load_pilot("tree:15"))  # into the free slot
    done = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert set(done) == {ids[1], third}
    assert all(completion.token_ids == alone.token_ids for completion in done.values() if completion)
    assert all(completion.text == alone.text for completion in done.values() if completion)
    assert engine.runner.cache.num_free == 4


def test_a_step_that_fails_on_its_way_frees_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    engine, params = llm.engine, SamplingParams(max_new_tokens=24, ignore_eos=True)
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), params, load_pilot("fixed:4"))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(Stopwatch, "wait", lambda self, index: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    assert engine.runner.cache.num_free == 4 and not engine.has_work
    assert llm.generate(PROMPTS[0], params, pilot="fixed:4", is_raw=True).num_tokens == 24


def test_texts_and_stop_strings_do_not_wait(runs: Runs) -> None:
    """What a caller is shown together is the answer, and a stop string ends it at once."""
    llm = build()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = llm.generate(PROMPTS[1], params, pilot="ar", is_raw=True)
    shown = list(llm.stream(PROMPTS[1], params, pilot="tree:15", is_raw=True))
    assert "".join(update.new_text for update in shown) == plain.text and runs
    stop = plain.text[8:10]
    expected = llm.generate(PROMPTS[1], replace(params, stop=(stop,)), pilot="ar", is_raw=True)
    found = llm.generate(PROMPTS[1], replace(params, stop=(stop,)), pilot="tree:15", is_raw=True)
    assert (found.text, found.token_ids, found.finish_reason) == (expected.text, expected.token_ids, "stop")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("num_prompts", [1, 4])
def test_the_next_step_is_begun_before_this_one_has_landed(runs: Runs, num_prompts: int) -> None:
    """Not where prompts have been read in between, and where a smaller pass serves those who are left."""
    llm = build(num_slots=num_prompts)
    params = SamplingParams(max_new_tokens=28, ignore_eos=True)
    plain = llm.generate(PROMPTS + PROMPTS[::-1], params, pilot="ar", is_raw=True)
    for pilot in ("fixed:8", "tree:15"):
        runs.clear()
        runs.ahead.clear()
        found = llm.generate(PROMPTS + PROMPTS[::-1], params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert sum(runs.ahead) > 0.5 * len(runs)


@pytest.mark.usefixtures("device")
def test_one_of_many_ends_unforeseen(runs: Runs) -> None:
    """The others lose nothing, and the next request gets the slot when all is through."""
    llm = build(num_slots=4)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = PROMPTS + PROMPTS[:2]
    plain = llm.generate(prompts, params, pilot="ar", is_raw=True)
    for pilot in ("fixed:4", "tree:15"):
        for index in range(4):
            each = [params] * len(prompts)
            each[index] = replace(params, stop_token_ids=(plain[index].token_ids[9],))
            expected = llm.generate(prompts, each, pilot="ar", is_raw=True)
            runs.clear()
            found = llm.generate(prompts, each, pilot=pilot, is_raw=True)
            assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
            assert found[index].finish_reason == "stop"
            assert sum(runs) <= sum(len(answer.steps) for answer in found) + 2 * len(prompts)
    assert llm.engine.runner.cache.num_free == 4 and any(runs.ahead)


@pytest.mark.usefixtures("device")
def test_a_full_context_ends_answers(runs: Runs) -> None:
    """The device never goes on to rows that a slot does not have, not for a request that has ended long ago either."""
    llm = build(context_length=60)
    params = [SamplingParams(max_new_tokens=1000, ignore_eos=True)] * 3 + [SamplingParams(max_new_tokens=3)]
    plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
    for pilot in ("fixed:4", "tree:15", "tree:63"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    joint, cache = llm.engine.joint, llm.engine.runner.cache
    assert joint is not None and any(runs.ahead)
    request = DraftRequest(cache.reserve(), 5, 0, 8, 16, params[0], (7, 7))
    flight = joint.start([request], Ahead(7))
    positions = [cache.capacity - 40]
    for _ in range(20):
        following = joint.follow(flight, Ahead(7), positions)
        if following is None:
            break
        joint.land(flight, [False])
        flight, positions = following, [None]
    assert following is None and flight.reach[0] + 8 <= cache.capacity
    joint.land(flight, [False])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_pilot_that_does_not_draft_decodes_plainly_and_probes(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    """As on the host, without it: the drafter sees every token, and what a pilot has chosen once is not asked again."""
    shown: list[bool] = []
    start = PlainStep.start

    def note(self: PlainStep, requests: Sequence[PlainRequest], *, is_shown: bool = False) -> PlainFlight:
        shown.append(is_shown)
        return start(self, requests, is_shown=is_shown)

    monkeypatch.setattr(PlainStep, "start", note)
    dear = replace(StepCosts.linear(draft=0.5, slope=0.4), padding=PlannedRunner.padding)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    sizes = []
    for is_joint in (True, False):
        llm = build(is_joint=is_joint, costs=dear)
        if not is_joint:
            llm.engine.plain = None
        pilot = StepPilot(Calibration.identity(), dear)
        found = llm.generate(PROMPTS[:num_prompts], params, pilot=[pilot] * num_prompts, is_raw=True)
        plain = llm.generate(PROMPTS[:num_prompts], params, pilot="ar", is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        drafts = [step.block_size for step in found[-1].steps]
        sizes.append([index for index, size in enumerate(drafts) if size > 1])
    assert shown.count(True) >= 2  # at first, and behind every probe
    assert len(sizes[0]) == len(sizes[1]) >= 2 and sizes[0][-1] == pytest.approx(sizes[1][-1], abs=6)


@pytest.mark.parametrize("is_chain", [False, True])
def test_all_steps_of_a_pilot_can_be_recorded_ahead(runs: Runs, is_chain: bool) -> None:
    llm = build(costs=PADDED)
    pilot = StepPilot(Calibration.identity(), PADDED, is_chain=is_chain, draft_sizes=(4, 8))
    llm.prepare(4, pilot="fixed:4")  # one that has no habits
    joint = llm.engine.joint
    assert joint is not None and not joint._courses
    llm.prepare(4, pilot=pilot)
    recorded = {key: len(course.turns[0].grow) for key, course in joint._courses.items()}
    params = [SamplingParams(max_new_tokens=10 * index + 9, ignore_eos=True) for index in range(4)]
    llm.generate(PROMPTS, params, pilot=[pilot] * 4, is_raw=True)
    assert {key: len(course.turns[0].grow) for key, course in joint._courses.items()} == recorded and runs


def test_a_pilot_that_decides_otherwise_is_waited_for(runs: Runs) -> None:
    llm = build()
    cache, joint = llm.engine.runner.cache, llm.engine.joint
    assert joint is not None
    request = DraftRequest(cache.reserve(), 5, 0, 8, 16, SamplingParams(), (7, 7))
    flight = joint.start([request], Ahead(7))
    for other in (Ahead(8), Ahead(7, is_chain=True), Ahead(7, weights=(Calibration.identity().plain_weights,) * 2)):
        assert joint.follow(flight, other, [0]) is None
    assert joint.follow(flight, Ahead(7), [0]) is not None
    joint.land(flight, [True])


def test_profiles_of_targets_with_few_rows_fall_back(runs: Runs) -> None:
    """Routed experts are checked 64 tokens at a time at most: what does not fit is timed over the host."""
    llm = build(name="qwen3_moe", num_slots=8)
    plan = ProfilePlan(verify_totals=(1, 8, 64, 128), draft_sizes=(4, 16), batch_sizes=(1, 8), contexts=(20,))
    costs = time_steps(llm, replace(plan, num_rounds=1), {})
    assert {point.tokens for point in costs.verify if point.batch_size == 8} == {1, 8, 16}
    assert set(runs) == {1, 8} and llm.engine.runner.cache.num_free == 8


def test_wide_selectors_go_the_hosts_way() -> None:
    drafter = make_dflash("qwen3", is_second=True)
    drafter.config = replace(drafter.config, selector_top_k=17)
    with pytest.MonkeyPatch.context() as patch:
        assert make_planned(patch, "qwen3", drafter=drafter).engine.joint is None


def test_news_of_a_finished_request_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 60)]
    alone = llm.generate(PROMPTS[0], params[0], pilot="fixed:4", is_raw=True)
    streams = [llm.stream(PROMPTS[0], one, pilot="fixed:4", is_raw=True) for one in params]
    shown = [next(stream) for stream in streams]
    follow, lost = JointStep.follow, []

    def fail_alone(
        self: JointStep, flight: JointFlight, ahead: Ahead, positions: Sequence[int | None]
    ) -> JointFlight | None:
        if None in positions:
            lost.append(1)
            raise RuntimeError("lost")
        return follow(self, flight, ahead, positions)

    monkeypatch.setattr(JointStep, "follow", fail_alone)
    with pytest.raises(RuntimeError, match="lost"):
        list(streams[1])
    assert lost and llm.engine.has_work
    rest = list(streams[0])
    assert rest[-1].completion is not None and rest[-1].completion.token_ids == alone.token_ids
    assert "".join(update.new_text for update in [shown[0], *rest]) == alone.text


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("pilot", ["ar", "fixed:4", "tree:15"])
def test_an_answer_does_not_grow_behind_its_end(pilot: str) -> None:
    """Where all steps on their way land at once, the second brings nothing to a request that the first has ended."""
    llm = build()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    full = llm.generate(PROMPTS[1], params, pilot="ar", is_raw=True)
    for place in range(3, 13):
        stopped = replace(params, stop_token_ids=(full.token_ids[place],))
        expected = llm.generate(PROMPTS[1], stopped, pilot="ar", is_raw=True)
        llm.engine.add_request(llm.tokenizer.encode(PROMPTS[1]), stopped, load_pilot(pilot))
        news = []
        while llm.engine.has_work:
            news += llm.engine.step()
            llm.engine.settle()
        assert [update.completion for update in news].count(None) == len(news) - 1
        last = news[-1].completion
        assert last is not None and (last.token_ids, last.text) == (expected.token_ids, expected.text)


def test_a_request_that_its_prompt_ends_is_told_even_if_decoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    engine, params = llm.engine, SamplingParams(max_new_tokens=24, ignore_eos=True)
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), params, load_pilot("fixed:4"))
    engine.step()
    short = engine.add_request(
        llm.tokenizer.encode(PROMPTS[2]), SamplingParams(max_new_tokens=1), load_pilot("fixed:4")
    )
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(JointStep, "start", lambda *given: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    news = engine.step()
    assert [(update.request_id, update.completion is not None) for update in news] == [(short, True)]
    assert not engine.has_work and engine.runner.cache.num_free == 4


def test_what_a_batch_has_chosen_is_not_for_one_that_is_left_alone() -> None:
    llm = build(costs=PADDED)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain = llm.generate([PROMPTS[3], PROMPTS[0]], params, pilot="ar", is_raw=True)
    for place in range(1, 20):
        pilot = StepPilot(Calibration.identity(), PADDED)
        both = [replace(params, stop_token_ids=(plain[0].token_ids[place],)), params]
        found = llm.generate([PROMPTS[3], PROMPTS[0]], both, pilot=[pilot] * 2, is_raw=True)
        assert found[1].token_ids == plain[1].token_ids
        assert all(step.block_size == 1 or step.verify_size > 1 for step in found[1].steps)  # no draft in vain


def test_drafts_of_large_batches_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of 16 are too many rows for one pass, shorter ones are timed inside of steps. The clock is ours: a
    step takes ten milliseconds, one for each checked token and one for each drafted."""
    monkeypatch.setattr(planned_dflash, "MAX_ROWS", 1024)
    take = step_timing._Bench._take_steps

    def take_steps(self: step_timing._Bench, tokens: int, draft_size: int) -> float:
        take(self, tokens, draft_size)
        self._draft_seconds[:] = [self.joint_size / 1e3]
        return 10.0 + tokens + draft_size

    monkeypatch.setattr(step_timing._Bench, "_take_steps", take_steps)
    llm = build(num_slots=128)
    plan = ProfilePlan(verify_totals=(128, 256, 512), draft_sizes=(4, 8, 16), batch_sizes=(128,), contexts=(20,))
    costs = time_steps(llm, replace(plan, num_rounds=1), {})
    drafts, checks = ({point.tokens: point.ms for point in points} for points in (costs.draft, costs.verify))
    assert costs.overhead_ms == 0
    assert (drafts[4], drafts[8]) == pytest.approx((4, 8))
    assert (checks[2], checks[4]) == pytest.approx((12, 14))
    assert drafts[16] > 0 and checks[1] > 0  # a clock's: a draft alone, and plain decoding


def test_an_abort_of_a_request_that_has_ended_shows_all_its_text() -> None:
    llm = build()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    last = llm.generate(PROMPTS[1], params, pilot="ar", is_raw=True).token_ids[9]
    params = replace(params, stop_token_ids=(last,))
    expected = llm.generate(PROMPTS[1], params, pilot="tree:15", is_raw=True)
    assert expected.finish_reason == "stop"
    request = llm.engine.add_request(llm.tokenizer.encode(PROMPTS[1]), params, load_pilot("tree:15"))
    for _ in range(20):
        llm.engine.step()
        llm.engine.settle()
        if llm.engine._landed and llm.engine._landed[0].finish_reason:
            break
    completion = llm.engine.abort(request)
    assert completion is not None and completion.text == expected.text
