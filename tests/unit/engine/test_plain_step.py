"""Plain steps that a device takes alone emit what the host's would. Here with the kernels' reference implementation.

On a CPU a pass is over as soon as it is begun; `device` has the other extreme, too.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockpilot import load_pilot
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from blockpilot.engine.plain_step import PlainFlight, PlainRequest, PlainStep
from blockpilot.engine.planned_runner import PlannedRunner
from blockpilot.models.gpu import Stopwatch
from tests.tiny import make_dflash, make_llm
from tests.unit.engine.late_device import Runs, device  # noqa: F401
from tests.unit.engine.test_planned import PROMPTS, make_planned

GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.7, seed=3)
NO_END = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    counted, start, follow = Runs(), PlainStep.start, PlainStep.follow

    def count(self: PlainStep, requests: Sequence[PlainRequest], *, is_shown: bool = False) -> PlainFlight:
        counted.append(len(requests))
        counted.ahead.append(False)
        return start(self, requests, is_shown=is_shown)

    def count_ahead(self: PlainStep, flight: PlainFlight, num_requests: int) -> PlainFlight | None:
        following = follow(self, flight, num_requests)
        if following is not None:
            counted.append(num_requests)
            counted.ahead.append(True)
        return following

    monkeypatch.setattr(PlainStep, "start", count)
    monkeypatch.setattr(PlainStep, "follow", count_ahead)
    return counted


def build(name: str = "qwen3", **options: object) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        llm = make_planned(patch, name, **options)
    assert llm.engine.plain is not None
    return llm


def told(answers: Sequence[Completion]) -> list[tuple[str, list[int], str, list[int]]]:
    return [
        (answer.text, answer.token_ids, answer.finish_reason, [step.emitted for step in answer.steps])
        for answer in answers
    ]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "T=0.7"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_answers_are_those_of_unplanned_passes(runs: Runs, name: str, params: SamplingParams) -> None:
    """One request; several of different lengths, of which some end; more than there are slots, with long prompts."""
    host, llm = make_llm(name), build(name)
    prompts = [*PROMPTS, "a prompt that is read in several pieces", *PROMPTS[::-1]]
    lengths = [replace(params, max_new_tokens=4 + 5 * (index % 4), seed=index) for index in range(len(prompts))]
    for few in (1, 4, len(prompts)):
        expected = host.generate(prompts[:few], lengths[:few], is_raw=True)
        found = llm.generate(prompts[:few], lengths[:few], is_raw=True)
        assert told(found) == told(expected)
        assert sum(runs) >= sum(len(answer.steps) for answer in found)  # all of them, and what nobody needed
        runs.clear()
    for step in found[0].steps:
        assert (step.block_size, step.verify_size, step.draft_seconds) == (1, 1, 0.0) and step.verify_seconds >= 0
    assert llm.engine.runner.cache.num_free == 4


@pytest.mark.usefixtures("device")
def test_the_next_pass_is_begun_before_it_is_asked_for(runs: Runs) -> None:
    llm = build()
    llm.generate(PROMPTS[0], NO_END, is_raw=True)
    assert runs.ahead == [False] + [True] * 22  # the first token is the prompt's, and none is decoded in vain
    runs.ahead.clear()
    llm.generate(PROMPTS, [replace(NO_END, max_new_tokens=2 + 4 * index) for index in range(4)], is_raw=True)
    assert (
        sum(runs.ahead) >= len(runs.ahead) - 5
    )  # when requests join, and when a smaller pass serves those who are left


@pytest.mark.usefixtures("device")
def test_answers_end_where_they_should(runs: Runs) -> None:
    host, llm = make_llm("qwen3"), build()
    plain = host.generate(PROMPTS, NO_END, is_raw=True)
    ends = [
        {"stop_token_ids": (plain[0].token_ids[5],)},
        {"stop": (plain[1].text[8:10],)},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
    ]
    params = [replace(NO_END, **end) for end in ends]  # type: ignore[arg-type]
    found = llm.generate(PROMPTS, params, is_raw=True)
    assert told(found) == told(host.generate(PROMPTS, params, is_raw=True))
    assert [answer.finish_reason for answer in found] == ["stop", "stop", "length", "length"] and runs
    shown = list(llm.stream(PROMPTS[1], NO_END, is_raw=True))
    assert "".join(update.new_text for update in shown) == plain[1].text


@pytest.mark.usefixtures("device")
def test_one_of_many_ends_unforeseen(runs: Runs) -> None:
    """The others go on in the same pass, whose plan the device has written and perhaps not yet read."""
    host, llm = make_llm("qwen3"), build()
    plain = host.generate(PROMPTS, NO_END, is_raw=True)
    for index in range(4):
        params = [NO_END] * 4
        params[index] = replace(NO_END, stop_token_ids=(plain[index].token_ids[7],))
        runs.ahead.clear()
        found = llm.generate(PROMPTS, params, is_raw=True)
        assert told(found) == told(host.generate(PROMPTS, params, is_raw=True))
        assert found[index].finish_reason == "stop" and runs.ahead.count(False) <= 6


def test_a_full_context_ends_answers(runs: Runs) -> None:
    """The device never goes on to rows that a slot does not have."""
    host, llm = make_llm("llama", context_length=40), build("llama", context_length=40)
    params = replace(NO_END, max_new_tokens=1000)
    assert told(llm.generate(PROMPTS, params, is_raw=True)) == told(host.generate(PROMPTS, params, is_raw=True))
    cache, plain = llm.engine.runner.cache, llm.engine.plain
    assert plain is not None and runs
    slot = cache.reserve()
    cache.lengths[slot] = cache.capacity - 1
    request = PlainRequest(slot, 1, cache.capacity - 1, (0, 0, 0))
    flight = plain.start([request])
    assert plain.follow(flight, 1) is None
    plain.land(flight, [True])


@pytest.mark.usefixtures("device")
def test_a_request_may_leave_while_its_step_is_on_its_way(runs: Runs) -> None:
    llm = build()
    alone = llm.generate(PROMPTS[1], NO_END, is_raw=True)
    engine = llm.engine
    ids = [engine.add_request(llm.tokenizer.encode(text), NO_END, load_pilot("ar")) for text in PROMPTS[:2]]
    for _ in range(4):
        engine.step()
    assert engine.abort(ids[0]) is not None and engine.runner.cache.num_free == 3
    third = engine.add_request(llm.tokenizer.encode(PROMPTS[1]), NO_END, load_pilot("ar"))  # into the free slot
    done = {}
    while engine.has_work:
        done |= {update.request_id: update.completion for update in engine.step() if update.completion}
    assert set(done) == {ids[1], third} and runs
    assert all(completion.token_ids == alone.token_ids for completion in done.values() if completion)
    assert engine.runner.cache.num_free == 4


def test_a_step_that_fails_on_its_way_frees_its_requests(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    llm = build()
    engine = llm.engine
    expected = llm.generate(PROMPTS[0], NO_END, is_raw=True)
    engine.add_request(llm.tokenizer.encode(PROMPTS[0]), NO_END, load_pilot("ar"))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(Stopwatch, "wait", lambda self, index: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    assert engine.runner.cache.num_free == 4 and not engine.has_work and runs
    assert told([llm.generate(PROMPTS[0], NO_END, is_raw=True)]) == told([expected])


def test_what_the_device_cannot_do_goes_other_ways(runs: Runs) -> None:
    llm, host = build(drafter=make_dflash("qwen3", is_second=True)), make_llm("qwen3")
    filtered = replace(SAMPLED, top_k=5)
    mixed = ["fixed:4", "tree:7", "ar", "fixed:4"]
    found = llm.generate(PROMPTS, filtered, pilot="ar", is_raw=True)
    assert told(found) == told(host.generate(PROMPTS, filtered, is_raw=True)) and not runs
    params = [replace(NO_END, max_new_tokens=10 + 14 * (pilot == "ar")) for pilot in mixed]
    found = llm.generate(PROMPTS, params, pilot=mixed, is_raw=True)
    plain = host.generate(PROMPTS, params, is_raw=True)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert runs and set(runs) == {1}  # when those that draft have ended
    runs.clear()
    pilots = ["ar", "fixed:4", "ar", "tree:15"]  # one after the other, in the same slots
    for pilot in pilots:
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert make_llm("qwen3").engine.plain is None


def test_prepared_passes_are_those_that_decoding_uses(runs: Runs) -> None:
    llm = build(drafter=make_dflash("qwen3"))
    llm.prepare(4)
    runner, plain = llm.engine.runner, llm.engine.plain
    assert isinstance(runner, PlannedRunner) and plain is not None
    recorded = set(plain._turns)
    params = [replace(NO_END, max_new_tokens=4 + 4 * index) for index in range(4)]
    assert told(llm.generate(PROMPTS, params, is_raw=True)) == told(
        make_llm("qwen3").generate(PROMPTS, params, is_raw=True)
    )
    assert set(plain._turns) == recorded and runs
