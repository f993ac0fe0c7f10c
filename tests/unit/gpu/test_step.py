"""Steps that a device takes alone emit what the host's would. Here with the kernels' reference implementation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot import load_pilot
from blockpilot.core.errors import RequestFailedError
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.step import StepExecutor, StepRequest
from blockpilot.engine import step_timing
from blockpilot.engine.llm import LLM
from blockpilot.engine.outbox import Outbox
from blockpilot.engine.step_timing import ProfilePlan, Sample, time_steps
from blockpilot.gpu import dflash
from blockpilot.gpu.device import Stopwatch
from blockpilot.gpu.step import DeviceExecutor, Ticket
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.pilots.base import PLAIN, Asked, Choice, PilotInputs, PrefillState
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import PlainPilot, TreePilot
from blockpilot.pilots.memory import StepMemory
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.simulate import simulate
from tests.tiny import make_dflash, make_llm
from tests.unit.gpu.late_device import Runs, make_gpu_llm
from tests.unit.gpu.test_passes import PROMPTS
from tests.unit.replay.pieces import decode, run_collect, shapes

CHEAP = StepCosts.linear(draft=0.05, slope=0.01)
SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=30),
    "T=0.7": SamplingParams(max_new_tokens=30, temperature=0.7, seed=3),
}


def build(*, is_second: bool = True, with_device_steps: bool = True, name: str = "qwen3", **options: object) -> LLM:
    drafter = make_dflash(name, is_second=is_second)
    return make_gpu_llm(name, with_device_steps=with_device_steps, drafter=drafter, **options)


def emitted(answers: Sequence[Completion]) -> list[list[int]]:
    return [[step.emitted for step in answer.steps] for answer in answers]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_answers_are_plain_decodings(runs: Runs, name: str, is_second: bool, sampling: str) -> None:
    llm, host = build(name=name, is_second=is_second), build(name=name, is_second=is_second, with_device_steps=False)
    params = SAMPLING[sampling]
    plain = [answer.token_ids for answer in llm.generate(PROMPTS, params, pilot="ar", is_raw=True)]
    assert not runs.drafted()
    for pilot in ("fixed:4", "fixed:16", "tree:15", "tree:70"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == plain
        assert max(runs.drafted(), default=0) == len(PROMPTS) or (name, pilot) == (
            "qwen3_moe",
            "tree:70",
        )  # too many rows
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


@dataclass
class WatchedPilot(StepPilot):
    """Keeps the memories of its requests."""

    started: list[StepMemory] = field(default_factory=list)

    def start(self, prefill: PrefillState | None, neighbours: Sequence[StepMemory] = ()) -> StepMemory:
        self.started.append(super().start(prefill, neighbours))
        return self.started[-1]


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_adaptive_pilots_learn_as_on_the_host(runs: Runs, num_prompts: int) -> None:
    sizes, memories = [], []
    for with_device_steps in (True, False):
        llm = build(with_device_steps=with_device_steps)
        pilot = WatchedPilot(Calibration.identity(), CHEAP)
        found = llm.generate(PROMPTS[:num_prompts], SAMPLING["greedy"], pilot=pilot, is_raw=True)
        plain = llm.generate(PROMPTS[:num_prompts], SAMPLING["greedy"], pilot="ar", is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        chosen = [[(one.block_size, one.verify_size) for one in answer.steps[:6]] for answer in found]
        sizes.append([list(dict.fromkeys(each))[:2] for each in chosen])  # a step behind another decides one step later
        first = pilot.started[0]
        recent = first.recent if num_prompts == 1 or first.batch is None else first.batch.recent
        memories.append((recent.average, recent.expected, recent.promised, recent.kept))
    assert runs.drafted() and sizes[0] == sizes[1]
    assert memories[0] == pytest.approx(memories[1], rel=0.1)


@pytest.mark.parametrize("costs", [StepCosts.linear(draft=0.05, slope=0.01), StepCosts.linear(draft=0.5, slope=0.4)])
def test_replay_repeats_pipelined_decisions(runs: Runs, costs: StepCosts, tmp_path: Path) -> None:
    """Choices come one step late on a device; replay knows, and takes the very same steps."""
    padded = replace(costs, padding=GpuTargetRunner.buckets)
    llm = build(num_slots=1)
    traces = list(run_collect(llm, tmp_path, sizes=(4, 8), draft_sizes=(4, 8), max_new_tokens=40))
    pilot = StepPilot(Calibration.identity(), costs, draft_sizes=(4, 8))
    online = decode(llm, pilot, max_new_tokens=40)
    assert [trace.answer_ids.tolist() for trace in traces] == [answer.token_ids for answer in online]
    assert [shapes(simulate(trace, pilot, padded, is_pipelined=True)) for trace in traces] == [
        shapes(answer.steps) for answer in online
    ]
    assert sum(runs.is_ahead) > 20


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


def test_costs_of_another_machine_do_not_leave_the_device(runs: Runs) -> None:
    llm = build(costs=StepCosts.linear(draft=0.05, slope=0.01))
    llm.generate(PROMPTS, SAMPLING["greedy"], pilot="step", is_raw=True)
    assert len(runs.drafted()) > 2


def test_a_pilot_that_is_asked_while_another_joins_is_asked_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a request has one choice, made once, whether it was enqueued or kept for later."""
    llm = build()
    asked: list[int] = []

    class CountingPilot(TreePilot):
        """Its size changes now and then: then the step behind is not enqueued, and its choice is kept."""

    pilot = CountingPilot(7)
    choose = TreePilot.choose

    def count(self: TreePilot, requests: Sequence[Asked]) -> list[Choice]:
        asked.extend(inputs.num_steps for _, inputs in requests)
        return [choice._replace(num_nodes=7 + len(asked) // 3 % 2) for choice in choose(self, requests)]

    monkeypatch.setattr(CountingPilot, "choose", count)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = llm.engine
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), params, pilot)
    is_joined = False
    while engine.has_work:
        if engine.pipeline._chosen and not is_joined:  # a choice is kept, and now another request comes
            engine.add_request(llm.tokenizer.encode(PROMPTS[2]), replace(params, max_new_tokens=4), pilot)
            is_joined = True
            asked.clear()
            engine.step()
            assert asked[0] == 0 and asked.count(0) <= 2  # the one that has joined, alone; then both, for what follows
            assert len(asked) in (1, 3)
        else:
            engine.step()
    assert is_joined


def test_what_the_device_cannot_run_takes_the_host_executor(runs: Runs) -> None:
    llm = build()
    filtered = SamplingParams(max_new_tokens=12, temperature=1.0, top_k=5, seed=1)
    mixed = ["fixed:4", "tree:7", "ar", "fixed:4"]
    for params, pilot in [(filtered, "tree:7"), (SAMPLING["greedy"], mixed)]:
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        runs.clear()
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert not runs.drafted() or (pilot is mixed and set(runs.drafted()) <= {1, 2})  # when one kind is left


def test_other_devices_have_no_such_steps() -> None:
    assert make_llm("qwen3", drafter=make_dflash("qwen3")).engine.device_executor is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("pilot", ["ar", "tree:15"])
def test_a_request_may_leave_while_its_step_is_in_flight(runs: Runs, pilot: str) -> None:
    llm = build()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPTS[1], params, pilot=pilot, is_raw=True)
    engine = llm.engine
    ids = [engine.add_request(llm.tokenizer.encode(text), params, load_pilot(pilot)) for text in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    assert engine.abort(ids[0]) is not None and engine.runner.cache.num_free == 3
    third = engine.add_request(llm.tokenizer.encode(PROMPTS[1]), params, load_pilot(pilot))  # into the free slot
    done = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert set(done) == {ids[1], third} and runs
    assert all(completion.token_ids == alone.token_ids for completion in done.values() if completion)
    assert all(completion.text == alone.text for completion in done.values() if completion)
    assert engine.runner.cache.num_free == 4


@pytest.mark.parametrize("pilot", ["ar", "fixed:4"])
def test_a_step_that_fails_in_flight_frees_its_requests(monkeypatch: pytest.MonkeyPatch, pilot: str) -> None:
    llm = build()
    engine, params = llm.engine, SamplingParams(max_new_tokens=24, ignore_eos=True)
    expected = llm.generate(PROMPTS[0], params, pilot=pilot, is_raw=True)
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), params, load_pilot(pilot))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(Stopwatch, "wait", lambda self, index: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    assert engine.runner.cache.num_free == 4 and not engine.has_work
    assert llm.generate(PROMPTS[0], params, pilot=pilot, is_raw=True).token_ids == expected.token_ids


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
def test_the_next_step_is_enqueued_before_this_one_has_landed(runs: Runs, num_prompts: int) -> None:
    """Not where prompts have been read in between, and where a smaller pass serves those who are left."""
    llm = build(num_slots=num_prompts)
    params = SamplingParams(max_new_tokens=28, ignore_eos=True)
    plain = llm.generate(PROMPTS + PROMPTS[::-1], params, pilot="ar", is_raw=True)
    for pilot in ("fixed:8", "tree:15"):
        runs.clear()
        found = llm.generate(PROMPTS + PROMPTS[::-1], params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert sum(runs.is_ahead) > 0.5 * len(runs.is_ahead)


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
            assert sum(runs.num_requests) <= sum(len(answer.steps) for answer in found) + 2 * len(prompts)
    assert llm.engine.runner.cache.num_free == 4 and any(runs.is_ahead)


@pytest.mark.usefixtures("device")
def test_a_full_context_ends_answers(runs: Runs) -> None:
    """The device never goes on to rows that a slot does not have, not for a request that has ended long ago either."""
    llm = build(context_length=60)
    params = [SamplingParams(max_new_tokens=1000, ignore_eos=True)] * 3 + [SamplingParams(max_new_tokens=3)]
    plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
    for pilot in ("fixed:4", "tree:15", "tree:63"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    executor, cache = llm.engine.device_executor, llm.engine.runner.cache
    assert executor is not None and any(runs.is_ahead)
    for choice in (Choice(8, 7), PLAIN):
        request = step_request(cache.reserve(), choice)
        ticket = executor.begin([request])
        positions: list[int | None] = [cache.capacity - 40]
        for _ in range(60):
            following = executor.follow(ticket, positions)
            if following is None:
                break
            executor.land(ticket, [False])
            ticket, positions = following, [None]
            if not positions[0] and choice is PLAIN:
                positions = [ticket.reach[0]]
        assert following is None and ticket.reach[0] + request.block_size <= cache.capacity
        executor.land(ticket, [False])


def step_request(slot: int, choice: Choice) -> StepRequest:
    inputs = PilotInputs(0, 0, 1, 100, 64, 8, 0.0, GpuTargetRunner.buckets)
    pilot = TreePilot(7) if choice.draft_size else PlainPilot()
    return StepRequest(slot, 5, SamplingParams(), pilot, None, inputs, choice)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_pilot_that_does_not_draft_decodes_plainly_and_probes(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    """As on the host, without it: the drafter sees every token, and what a pilot has chosen once is not asked again."""
    watched: list[bool] = []
    begin = DeviceExecutor._begin_plain

    def note(self: DeviceExecutor, requests: Sequence[StepRequest]) -> Ticket | None:
        ticket = begin(self, requests)
        watched.append(ticket is not None and ticket.step.is_observed)
        return ticket

    monkeypatch.setattr(DeviceExecutor, "_begin_plain", note)
    dear = StepCosts.linear(draft=0.5, slope=0.4)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    sizes = []
    for with_device_steps in (True, False):
        llm = build(with_device_steps=with_device_steps, costs=dear)
        pilot = StepPilot(Calibration.identity(), dear)
        found = llm.generate(PROMPTS[:num_prompts], params, pilot=pilot, is_raw=True)
        plain = llm.generate(PROMPTS[:num_prompts], params, pilot="ar", is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        drafts = [step.block_size for step in found[-1].steps]
        sizes.append([index for index, size in enumerate(drafts) if size > 1])
    assert watched.count(True) >= 2  # at first, and behind every probe
    assert len(sizes[0]) == pytest.approx(len(sizes[1]), abs=2) and len(sizes[1]) >= 2
    assert sizes[0][-1] == pytest.approx(sizes[1][-1], abs=6)


@pytest.mark.parametrize("pilot", ["step", "chain-step", "fixed:8", "tree:15", "tree:20@12"])
def test_all_steps_of_a_pilot_can_be_recorded_before_they_occur(runs: Runs, pilot: str) -> None:
    llm = build(costs=CHEAP)
    executor = llm.engine.device_executor
    assert executor is not None
    llm.prepare(4, pilot=pilot)

    def recorded() -> set[tuple[int, int]]:
        return {(id(step), len(step.results[0].grow)) for step in executor._steps.values()}

    before = recorded()
    params = [SamplingParams(max_new_tokens=10 * index + 9, ignore_eos=True) for index in range(4)]
    llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
    assert recorded() == before and runs.drafted()


def test_profiles_of_targets_with_few_rows_fall_back(runs: Runs) -> None:
    """Routed experts are checked 64 tokens at a time at most: what does not fit is timed over the host."""
    llm = build(name="qwen3_moe", num_slots=8)
    plan = ProfilePlan(verify_totals=(1, 8, 64, 128), draft_sizes=(4, 16), batch_sizes=(1, 8), contexts=(20,))
    costs = time_steps(llm, replace(plan, num_rounds=1), {})
    assert {point.tokens for point in costs.verify if point.batch_size == 8} == {1, 4, 8, 16}  # 4 behind drafts of 4
    assert set(runs.num_requests) == {1, 8} and llm.engine.runner.cache.num_free == 8


def test_wide_selectors_take_the_host_executor() -> None:
    drafter = make_dflash("qwen3", is_second=True)
    drafter.config = replace(drafter.config, selector_top_k=17)
    executor = make_gpu_llm("qwen3", drafter=drafter).engine.device_executor
    assert executor is not None and executor.drafter is None and executor.bound is not None


def test_updates_of_a_finished_request_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 60)]
    alone = llm.generate(PROMPTS[0], params[0], pilot="fixed:4", is_raw=True)
    streams = [llm.stream(PROMPTS[0], one, pilot="fixed:4", is_raw=True) for one in params]
    shown = [next(stream) for stream in streams]
    follow, lost = DeviceExecutor.follow, []

    def fail_alone(self: DeviceExecutor, ticket: Ticket, positions: Sequence[int | None]) -> Ticket | None:
        if None in positions:
            lost.append(1)
            raise RuntimeError("lost")
        return follow(self, ticket, positions)

    monkeypatch.setattr(DeviceExecutor, "follow", fail_alone)
    with pytest.raises(RuntimeError, match="lost"):
        list(streams[1])
    assert lost
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


def test_a_request_that_finishes_during_prefill_is_reported_if_decoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    engine, params = llm.engine, SamplingParams(max_new_tokens=24, ignore_eos=True)
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), params, load_pilot("fixed:4"))
    engine.step()
    short = engine.add_request(
        llm.tokenizer.encode(PROMPTS[2]), SamplingParams(max_new_tokens=1), load_pilot("fixed:4")
    )
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(DeviceExecutor, "begin", lambda *given: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    news = engine.step()
    assert [(update.request_id, update.completion is not None) for update in news] == [(short, True)]
    assert not engine.has_work and engine.runner.cache.num_free == 4


def test_what_a_batch_has_chosen_is_not_for_one_that_is_left_alone() -> None:
    llm = build(costs=CHEAP)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain = llm.generate([PROMPTS[3], PROMPTS[0]], params, pilot="ar", is_raw=True)
    for place in range(1, 20):
        pilot = StepPilot(Calibration.identity(), CHEAP)
        both = [replace(params, stop_token_ids=(plain[0].token_ids[place],)), params]
        found = llm.generate([PROMPTS[3], PROMPTS[0]], both, pilot=pilot, is_raw=True)
        assert found[1].token_ids == plain[1].token_ids
        assert all(step.block_size == 1 or step.verify_size > 1 for step in found[1].steps)  # no draft in vain


def test_drafts_of_large_batches_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of 16 are too many rows for one pass, checks are timed behind shorter ones. The clock is ours: a
    step takes ten milliseconds, one for each checked token and one for each drafted."""
    monkeypatch.setattr(dflash, "MAX_DRAFT_ROWS", 1024)
    land = step_timing._Probe._land

    def land_on_time(self: step_timing._Probe, executor: StepExecutor, ticket: Any, started: float) -> Sample:
        sample = land(self, executor, ticket, started)
        if not isinstance(executor, DeviceExecutor) or ticket.step.draft is None:
            return sample
        size = max(request.block_size for request in ticket.requests)
        return Sample(size, 10.0 + 1 + ticket.limits[0][0])

    monkeypatch.setattr(step_timing._Probe, "_land", land_on_time)
    llm = build(num_slots=128)
    plan = ProfilePlan(verify_totals=(128, 256, 512), draft_sizes=(4, 8, 16), batch_sizes=(128,), contexts=(20,))
    costs = time_steps(llm, replace(plan, num_rounds=1), {})
    drafts, checks = ({point.tokens: point.ms for point in points} for points in (costs.draft, costs.verify))
    assert costs.overhead_ms == 0
    assert (drafts[4], drafts[8]) == pytest.approx((4, 8))
    assert (checks[2], checks[4]) == pytest.approx((12, 14))
    assert drafts[16] > 0 and checks[1] > 0  # a clock's: a draft on the host's way, and plain decoding


def test_an_abort_of_a_request_that_has_ended_shows_all_its_text() -> None:
    llm = build()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    last = llm.generate(PROMPTS[1], params, pilot="ar", is_raw=True).token_ids[9]
    params = replace(params, stop_token_ids=(last,))
    expected = llm.generate(PROMPTS[1], params, pilot="tree:15", is_raw=True)
    assert expected.finish_reason == "stop"
    request = llm.engine.add_request(llm.tokenizer.encode(PROMPTS[1]), params, load_pilot("tree:15"))
    engine = llm.engine
    with pytest.MonkeyPatch.context() as patch:  # it has landed, and its text has not been written yet
        patch.setattr(Outbox, "finished", lambda outbox: [])
        for _ in range(20):
            engine.step()
            engine.settle()
            sequence = engine.scheduler.find(request)
            if sequence is not None and sequence.finish_reason:
                break
    completion = engine.abort(request)
    assert completion is not None and completion.text == expected.text


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_prompt_whose_scores_are_no_numbers_ends_its_request(sampling: str) -> None:
    llm = build()
    with torch.no_grad():
        llm.engine.runner.decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(RequestFailedError, match="gives no finite scores for token 1 of the answer"):
        llm.generate(PROMPTS[0], SAMPLING[sampling], pilot="tree:15", is_raw=True)
    assert llm.engine.runner.cache.num_free == 4 and not llm.engine.has_work
