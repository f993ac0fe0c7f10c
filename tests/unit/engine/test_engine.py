"""The engine: bad requests, aborts, failing passes. It stays usable after each of them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.step import StepRequest
from blockpilot.engine import engine as engine_module
from blockpilot.engine import llm as llm_module
from blockpilot.engine import step_timing
from blockpilot.engine.llm import LLM
from blockpilot.engine.profile import measure
from blockpilot.engine.step_timing import ProfilePlan
from blockpilot.gpu.device import on_device
from blockpilot.pilots.base import Choice, Outcome
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.pilots.registry import load_pilot
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE, RandomTreePilot, make_dflash, make_llm
from tests.unit.gpu.late_device import make_gpu_llm

PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True)
NUM_SLOTS = 4


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert engine.runner.cache.num_free == NUM_SLOTS
    assert not engine.has_work
    assert engine.outbox._shown == {} and not engine.pipeline.steps
    if engine.drafter is not None:
        assert engine.drafter.cache.lengths == [0] * NUM_SLOTS  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * CONTEXT_LENGTH, f"{CONTEXT_LENGTH} tokens and the context holds {CONTEXT_LENGTH}"),
        ([1, VOCAB_SIZE], f"outside the vocabulary of {VOCAB_SIZE}"),
        ([-1, 2], "outside the vocabulary"),
    ],
    ids=["empty", "too long", "id too large", "negative id"],
)
def test_bad_prompts_are_refused_and_take_nothing(prompt_ids: list[int], message: str) -> None:
    llm = make_llm()
    with pytest.raises(InputError, match=message):
        llm.engine.add_request(prompt_ids, PARAMS, load_pilot("ar"))
    with pytest.raises(InputError, match=message):
        llm.generate([[1, 2], prompt_ids], PARAMS)  # the good one beside it is taken back
    assert_idle(llm)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_text_is_refused(prompt: str) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        make_llm().generate(prompt, is_raw=True)


def test_a_prompt_of_token_ids_stands_in_a_list_of_prompts() -> None:
    llm = make_llm()
    with pytest.raises(InputError, match=r"give one prompt of token ids as \[\[\.\.\.\]\]"):
        llm.generate([1, 2, 3], PARAMS)  # type: ignore[list-item]
    assert len(llm.generate([[1, 2, 3]], PARAMS)) == 1
    assert_idle(llm)


def test_pilots_may_be_named_one_for_each_prompt() -> None:
    llm = make_llm(drafter=make_dflash())
    plain, drafted = llm.generate(["abc", "hello"], PARAMS, pilot=["ar", "fixed:4"], is_raw=True)
    assert {step.block_size for step in plain.steps} == {1} and 4 in {step.block_size for step in drafted.steps}


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    completion = make_llm().generate([[1] * (CONTEXT_LENGTH - 1)], PARAMS)[0]
    assert (completion.num_tokens, completion.finish_reason) == (1, "length")


@pytest.mark.parametrize("pilot", ["fixed:4", "tree:7", RandomTreePilot(0)])
def test_a_pilot_that_drafts_needs_a_drafter(pilot: object) -> None:
    llm = make_llm()
    name = pilot if isinstance(pilot, str) else "random-tree"
    with pytest.raises(InputError, match=f"pilot '{name}' needs a drafter"):
        llm.generate("abc", PARAMS, pilot=pilot, is_raw=True)  # type: ignore[call-overload]
    assert_idle(llm)


def test_one_each_must_match_the_number_of_prompts() -> None:
    llm = make_llm()
    with pytest.raises(InputError, match="2 prompts but 3 params"):
        llm.generate(["ab", "cd"], [PARAMS] * 3, is_raw=True)
    assert_idle(llm)


def test_requests_beyond_the_slots_wait_and_are_served() -> None:
    llm = make_llm()
    ids = [llm.engine.add_request([1 + n], PARAMS, load_pilot("ar")) for n in range(NUM_SLOTS + 2)]
    llm.engine.step()
    assert llm.engine.runner.cache.num_free == 0
    assert len(llm.engine.scheduler.waiting) == 2
    done = set()
    while llm.engine.has_work:
        done |= {update.request_id for update in llm.engine.step() if update.completion is not None}
    assert done == set(ids)
    assert_idle(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_frees_whatever_the_request_holds(num_steps: int) -> None:
    """Waiting, in mid-prefill (24 tokens at 16 a pass), decoding."""
    llm = make_llm(drafter=make_dflash())
    request_id = llm.engine.add_request([3] * 24, PARAMS, load_pilot("fixed:2"))
    for _ in range(num_steps):
        llm.engine.step()
    completion = llm.engine.abort(request_id)
    assert completion is not None
    assert completion.finish_reason == "abort"
    assert (completion.num_tokens > 0) == (num_steps >= 2)
    assert llm.engine.abort(request_id) is None
    assert_idle(llm)


class OutOfMemoryError(Exception):
    pass


@pytest.mark.parametrize("stage", ["prefill", "verify"])
def test_a_failing_pass_frees_its_slots_and_the_engine_goes_on(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(["abc", "hello"], PARAMS, pilot="fixed:4", is_raw=True)

    def fail(*_: object) -> None:
        raise OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, stage, fail)
        with pytest.raises(OutOfMemoryError):
            llm.generate(["abc", "hello"], PARAMS, pilot="fixed:4", is_raw=True)
    assert_idle(llm)
    again = llm.generate(["abc", "hello"], PARAMS, pilot="fixed:4", is_raw=True)
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]


def test_a_failing_prefill_leaves_the_requests_outside_that_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    plain = llm.generate("abc", PARAMS, is_raw=True)
    first = llm.engine.add_request(llm.tokenizer.encode("abc"), PARAMS, load_pilot("ar"))
    llm.engine.step()
    llm.engine.add_request([5, 6], PARAMS, load_pilot("ar"))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    finished = []
    while llm.engine.has_work:
        finished += [update for update in llm.engine.step() if update.completion is not None]
    assert [update.request_id for update in finished] == [first]
    assert finished[0].completion is not None and finished[0].completion.token_ids == plain.token_ids
    assert_idle(llm)


def test_a_pilot_that_answers_nonsense_does_not_take_the_engine_down() -> None:
    llm = make_llm(drafter=make_dflash())
    pilot = RandomTreePilot(0)
    pilot.choose = lambda requests: [Choice(4)] * len(requests)  # type: ignore[method-assign]
    for nodes, complaint in ([(5, 1)], "parent 5"), ([(0, 1)] * 129, "more than the 128 nodes of one check"):
        pilot._nodes = lambda draft, nodes=nodes: nodes  # type: ignore[misc, method-assign]
        with pytest.raises(BlockPilotError, match=complaint):
            llm.generate("abc", PARAMS, pilot=pilot, is_raw=True)
        assert_idle(llm)


def test_a_pilot_that_must_measure_waits_for_slots(model_cache: Path) -> None:
    """Step costs are measured in slots of their own: requests that hold all of them are answered first."""
    llm = make_llm(drafter=make_dflash(), num_slots=2)
    plain = llm.generate(["abc", "hello", "z"], PARAMS, pilot="ar", is_raw=True)
    streams = [llm.stream(text, PARAMS, pilot="ar", is_raw=True) for text in ("abc", "hello")]
    shown = [[next(stream)] for stream in streams]
    adaptive = llm.generate("z", PARAMS, pilot="auto", is_raw=True)  # it is resolved while no slot is free
    for stream, updates in zip(streams, shown, strict=True):
        updates += stream
    assert adaptive.token_ids == plain[2].token_ids
    assert ["".join(update.new_text for update in updates) for updates in shown] == [one.text for one in plain[:2]]
    assert llm.engine.runner.cache.num_free == 2 and not llm.engine.has_work


def test_the_time_in_which_a_pilot_learns_counts() -> None:
    class SlowLearner(FixedPilot):
        def learn(self, outcomes: Sequence[Outcome]) -> None:
            time.sleep(0.005)

    done = make_llm(drafter=make_dflash()).generate("abc", PARAMS, pilot=SlowLearner(4), is_raw=True)
    learned = [step for step in done.steps[:-1] if step.block_size > 1]  # nobody learns from an answer's last step
    assert learned and all(step.pilot_seconds >= 0.005 for step in learned)
    assert done.decode_seconds >= done.pilot_seconds >= 0.005 * len(learned)


def test_kernels_run_on_the_engines_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is the engine's while it steps, settles, prepares or is measured, and another's before and
    after: kernels are compiled, recorded and launched on the current one."""
    depths = [0]  # of guards, one after the other

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        assert device == torch.device("cpu")
        depths.append(depths[-1] + 1)
        yield
        depths.append(depths[-1] - 1)

    llm = make_gpu_llm("llama", drafter=make_dflash(), num_slots=2)
    for module in (engine_module, llm_module, step_timing):
        monkeypatch.setattr(module, "on_device", enter)
    executor = llm.engine.device_executor
    assert executor is not None
    begin, record = executor.begin, executor._record_step

    def begin_inside(requests: Sequence[StepRequest]) -> object:
        assert depths[-1]
        return begin(requests)

    def record_inside(*passes: Any) -> object:
        assert depths[-1]
        return record(*passes)

    monkeypatch.setattr(executor, "begin", begin_inside)
    monkeypatch.setattr(executor, "_record_step", record_inside)
    llm.prepare(1, pilot="tree:7")
    llm.generate("abc", PARAMS, pilot="tree:7", is_raw=True)
    llm.engine.settle()
    measure(llm, ProfilePlan(draft_sizes=(4,), verify_totals=(1, 4), contexts=(8,), num_rounds=1))
    assert depths[-1] == 0 and len(depths) > 20


def test_another_gpu_than_the_current_one_can_be_named() -> None:
    guard = on_device(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 1
    with on_device(torch.device("cpu")):
        pass
