"""Any interleaving of add, step and abort: nothing leaks, and every finished answer is the plain one."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.registry import load_pilot
from tests.tiny import RandomTreePilot, make_dflash, make_llm

NUM_SLOTS = 4
PROMPTS = [(5,), (9, 8, 9, 8, 9, 8), tuple(range(2, 25)), (40, 41)]
PARAMS = [
    SamplingParams(max_new_tokens=7, ignore_eos=True),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=9, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(max_new_tokens=11, temperature=1.0, seed=4, stop_token_ids=(7, 20, 33)),
]
PILOTS = ["ar", "fixed:2", "fixed:7", "tree:5", "random"]

requests = st.tuples(st.sampled_from(PROMPTS), st.sampled_from(range(len(PARAMS))), st.sampled_from(PILOTS))
actions = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


@cache
def drafting_llm(target: str, drafter: str) -> LLM:
    model = "ngram" if drafter == "ngram" else make_dflash(target, is_second=drafter == "dflash2")
    return make_llm(target, drafter=model, num_slots=NUM_SLOTS)


@cache
def plain_answer(target: str, prompt: tuple[int, ...], params_index: int) -> tuple[list[int], str, str]:
    completion = plain_llm(target).generate([list(prompt)], PARAMS[params_index])[0]
    return completion.token_ids, completion.text, completion.finish_reason


@cache
def plain_llm(target: str) -> LLM:
    return make_llm(target)


def make_pilot(name: str) -> Pilot:
    return RandomTreePilot(seed=1) if name == "random" else load_pilot(name)


def assert_nothing_leaked(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    assert engine.runner.cache.num_free == NUM_SLOTS
    assert engine.runner.cache.lengths == [0] * NUM_SLOTS
    assert engine.outbox._shown == {} and not engine.pipeline.steps
    drafter = engine.drafter
    if hasattr(drafter, "cache"):
        assert drafter.cache.lengths == [0] * NUM_SLOTS
    else:
        assert drafter._lookups == {}  # type: ignore[union-attr]


class Run:
    """One engine under a random script, with what was asked and what came out."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.target = llm.engine, llm.target_name
        self.asked: dict[int, tuple[tuple[int, ...], int]] = {}
        self.texts: dict[int, str] = {}

    def add(self, prompt: tuple[int, ...], params_index: int, pilot: str) -> None:
        request_id = self.engine.add_request(list(prompt), PARAMS[params_index], make_pilot(pilot))
        self.asked[request_id], self.texts[request_id] = (prompt, params_index), ""

    def step(self) -> None:
        for update in self.engine.step():
            self.texts[update.request_id] += update.new_text
            if update.completion is not None:
                done = update.completion
                expected = plain_answer(self.target, *self.asked.pop(update.request_id))
                assert (done.token_ids, done.text, done.finish_reason) == expected
                assert self.texts[update.request_id] == done.text
                assert done.num_tokens == 1 + sum(step.emitted for step in done.steps)

    def abort(self, choice: int) -> None:
        if self.asked:
            request_id = sorted(self.asked)[choice % len(self.asked)]
            completion = self.engine.abort(request_id)
            assert completion is not None and completion.finish_reason == "abort"
            whole = plain_answer(self.target, *self.asked.pop(request_id))[0]
            assert completion.token_ids == whole[: completion.num_tokens]


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("llama", "ngram"),
        ("llama", "dflash"),
        ("llama", "dflash2"),
        ("llama-int8", "dflash"),
        ("qwen3-int8", "dflash2"),
    ],
)
@settings(max_examples=50, deadline=None)
@given(script=st.lists(actions, max_size=20))
def test_nothing_leaks_and_every_answer_is_the_plain_one(
    target: str, drafter: str, script: list[tuple[str, object]]
) -> None:
    llm = drafting_llm(target, drafter)
    run = Run(llm)
    try:
        for action, argument in script:
            if action == "add":
                run.add(*argument)  # type: ignore[misc]
            elif action == "step":
                for _ in range(argument):  # type: ignore[call-overload]
                    run.step()
            else:
                run.abort(argument)  # type: ignore[arg-type]
            cache = llm.engine.runner.cache
            running = len(llm.engine.scheduler.prefilling) + len(llm.engine.scheduler.decoding)
            assert cache.num_free == NUM_SLOTS - running
        while llm.engine.has_work:
            run.step()
        assert run.asked == {}
        assert_nothing_leaked(llm)
    finally:
        for request_id in run.asked:  # a failed example must not spoil the next one
            llm.engine.abort(request_id)
