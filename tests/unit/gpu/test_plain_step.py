"""Plain steps that a device takes alone emit what the host's would. Here with the kernels' reference implementation.

On a CPU a pass is over as soon as it is begun; `device` has the other extreme, too.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from tests.tiny import make_dflash, make_llm
from tests.unit.gpu.late_device import Runs, make_gpu_llm
from tests.unit.gpu.test_passes import PROMPTS

GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.7, seed=3)
NO_END = SamplingParams(max_new_tokens=24, ignore_eos=True)


def results(answers: Sequence[Completion]) -> list[tuple[str, list[int], str, list[int]]]:
    return [
        (answer.text, answer.token_ids, answer.finish_reason, [step.emitted for step in answer.steps])
        for answer in answers
    ]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "T=0.7"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_answers_are_those_of_unrecorded_passes(runs: Runs, name: str, params: SamplingParams) -> None:
    """One request; several of different lengths, of which some end; more than there are slots, with long prompts."""
    host, llm = make_llm(name), make_gpu_llm(name)
    prompts = [*PROMPTS, "a prompt that is read in several pieces", *PROMPTS[::-1]]
    lengths = [replace(params, max_new_tokens=4 + 5 * (index % 4), seed=index) for index in range(len(prompts))]
    for few in (1, 4, len(prompts)):
        expected = host.generate(prompts[:few], lengths[:few], is_raw=True)
        found = llm.generate(prompts[:few], lengths[:few], is_raw=True)
        assert results(found) == results(expected)
        assert sum(runs.num_requests) >= sum(
            len(answer.steps) for answer in found
        )  # all of them, and what nobody needed
        runs.clear()
    for step in found[0].steps:
        assert (step.block_size, step.verify_size, step.draft_seconds) == (1, 1, 0.0) and step.verify_seconds >= 0
    assert llm.engine.runner.cache.num_free == 4


@pytest.mark.usefixtures("device")
def test_the_next_pass_is_enqueued_before_it_is_asked_for(runs: Runs) -> None:
    llm = make_gpu_llm()
    llm.generate(PROMPTS[0], NO_END, is_raw=True)
    assert runs.is_ahead == [False] + [True] * 22  # the first token is the prompt's, and none is decoded in vain
    runs.clear()
    llm.generate(PROMPTS, [replace(NO_END, max_new_tokens=2 + 4 * index) for index in range(4)], is_raw=True)
    assert (
        sum(runs.is_ahead) >= len(runs.is_ahead) - 5
    )  # when requests join, and when a smaller pass serves those who are left


@pytest.mark.usefixtures("device")
def test_answers_end_where_they_should(runs: Runs) -> None:
    host, llm = make_llm("qwen3"), make_gpu_llm()
    plain = host.generate(PROMPTS, NO_END, is_raw=True)
    ends = [
        {"stop_token_ids": (plain[0].token_ids[5],)},
        {"stop": (plain[1].text[8:10],)},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
    ]
    params = [replace(NO_END, **end) for end in ends]  # type: ignore[arg-type]
    found = llm.generate(PROMPTS, params, is_raw=True)
    assert results(found) == results(host.generate(PROMPTS, params, is_raw=True))
    assert [answer.finish_reason for answer in found] == ["stop", "stop", "length", "length"] and runs
    shown = list(llm.stream(PROMPTS[1], NO_END, is_raw=True))
    assert "".join(update.new_text for update in shown) == plain[1].text


@pytest.mark.usefixtures("device")
def test_one_of_many_ends_unforeseen(runs: Runs) -> None:
    """The others go on in the same pass, whose plan the device has written and perhaps not yet read."""
    host, llm = make_llm("qwen3"), make_gpu_llm()
    plain = host.generate(PROMPTS, NO_END, is_raw=True)
    for index in range(4):
        params = [NO_END] * 4
        params[index] = replace(NO_END, stop_token_ids=(plain[index].token_ids[7],))
        runs.clear()
        found = llm.generate(PROMPTS, params, is_raw=True)
        assert results(found) == results(host.generate(PROMPTS, params, is_raw=True))
        assert found[index].finish_reason == "stop" and runs.is_ahead.count(False) <= 6


def test_a_full_context_ends_answers(runs: Runs) -> None:
    """The device never goes on to rows that a slot does not have."""
    host, llm = make_llm("llama", context_length=40), make_gpu_llm("llama", context_length=40)
    params = replace(NO_END, max_new_tokens=1000)
    assert results(llm.generate(PROMPTS, params, is_raw=True)) == results(host.generate(PROMPTS, params, is_raw=True))
    assert runs


def test_what_the_device_cannot_run_takes_other_paths(runs: Runs) -> None:
    llm, host = make_gpu_llm(drafter=make_dflash("qwen3", is_second=True)), make_llm("qwen3")
    filtered = replace(SAMPLED, top_k=5)
    mixed = ["fixed:4", "tree:7", "ar", "fixed:4"]
    found = llm.generate(PROMPTS, filtered, pilot="ar", is_raw=True)
    assert results(found) == results(host.generate(PROMPTS, filtered, is_raw=True)) and not runs
    params = [replace(NO_END, max_new_tokens=10 + 14 * (pilot == "ar")) for pilot in mixed]
    found = llm.generate(PROMPTS, params, pilot=mixed, is_raw=True)
    plain = host.generate(PROMPTS, params, is_raw=True)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert runs and set(runs.num_requests) == {1}  # when those that draft have finished
    runs.clear()
    pilots = ["ar", "fixed:4", "ar", "tree:15"]  # one after the other, in the same slots
    for pilot in pilots:
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert make_llm("qwen3").engine.device_executor is None


def test_prepared_passes_are_those_that_decoding_uses(runs: Runs) -> None:
    llm = make_gpu_llm(drafter=make_dflash("qwen3"))
    llm.prepare(4)
    executor = llm.engine.device_executor
    assert executor is not None
    recorded = set(executor._steps)
    params = [replace(NO_END, max_new_tokens=4 + 4 * index) for index in range(4)]
    assert results(llm.generate(PROMPTS, params, is_raw=True)) == results(
        make_llm("qwen3").generate(PROMPTS, params, is_raw=True)
    )
    assert set(executor._steps) == recorded and runs
