"""What goes wrong with one request ends that one alone; its neighbours' texts are what they would have been."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.core.errors import BlockPilotError, InputError, RequestFailedError
from blockpilot.core.records import Completion
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot
from tests.tiny import make_dflash, make_eagle3, make_llm

PROMPTS = ["abc", "hello there", "Z"]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=0.8, seed=3)


def break_pilot(stage: str) -> FixedPilot:
    def fail(*_: object) -> Any:
        raise LookupError("no such size")

    kind: type[FixedPilot] = type("Broken", (FixedPilot,), {stage: fail})
    return kind(4)


def ask_beside(llm: LLM, bad: Callable[[LLM], int]) -> tuple[list[Completion], Completion]:
    """The completions of three good requests, and of a bad one that joins their batch."""
    ids = [llm.engine.add_request(llm.tokenizer.encode(text), PARAMS, llm.resolve_pilot("fixed:4")) for text in PROMPTS]
    for _ in range(3):
        llm.engine.step()
    ids.append(bad(llm))
    done: dict[int, Completion] = {}
    while llm.engine.has_work:
        done |= {update.request_id: update.completion for update in llm.engine.step() if update.completion}
    assert llm.engine.runner.cache.num_free == 4
    return [done[number] for number in ids[:-1]], done[ids[-1]]


@pytest.mark.parametrize("stage", ["start", "choose", "select", "learn"])
def test_a_pilot_that_fails_ends_its_own_requests(stage: str) -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(PROMPTS, PARAMS, pilot="ar", is_raw=True)
    good, bad = ask_beside(llm, lambda llm: llm.engine.add_request([5, 6, 7], PARAMS, break_pilot(stage)))
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    assert bad.finish_reason == "error" and bad.error == "pilot 'fixed:4' failed (LookupError: no such size)"


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_detokenizer_that_fails_ends_its_own_request(stop: tuple[str, ...]) -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(PROMPTS, PARAMS, pilot="ar", is_raw=True)

    def open_bad(llm: LLM) -> int:
        number = llm.engine.add_request([5, 6, 7], replace(PARAMS, stop=stop), llm.resolve_pilot("ar"))
        sequence = llm.engine.find(number)
        assert sequence is not None
        sequence.detokenizer.push = lambda token_id: 1 / 0  # type: ignore[assignment, method-assign]
        return number

    good, bad = ask_beside(llm, open_bad)
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    assert bad.finish_reason == "error" and "ZeroDivisionError" in (bad.error or "")


def test_all_completions_come_with_the_error() -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(PROMPTS, PARAMS, pilot="ar", is_raw=True)
    with pytest.raises(RequestFailedError, match="no such size") as caught:
        llm.generate(PROMPTS, PARAMS, pilot=["ar", break_pilot("choose"), "fixed:4"], is_raw=True)
    first, failed, last = caught.value.completions
    assert [first.text, last.text] == [expected[0].text, expected[2].text]
    assert failed.finish_reason == "error" and failed.token_ids == expected[1].token_ids[:1]
    with pytest.raises(RequestFailedError, match="no such size"):
        list(llm.stream("abc", PARAMS, pilot=break_pilot("choose"), is_raw=True))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("top_k", 2.7, "whole number"),
        ("top_k", True, "whole number"),
        ("seed", 1.5, "whole number"),
        ("seed", "7", "whole number"),
        ("stop", (5,), "list of strings"),
        ("stop", {"a": 1}, "list of strings"),
        ("stop", ["a"] * 65, "fewer or shorter"),
        ("stop", "a" * 1025, "fewer or shorter"),
        ("max_new_tokens", 2.5, "whole number"),
        ("max_new_tokens", 2**40, "must be at most"),
        ("max_new_tokens", None, "whole number"),
        ("temperature", "0.5", "must be a number"),
        ("temperature", [1.0], "must be a number"),
        ("temperature", 10**400, "finite"),
        ("top_p", None, "must be a number"),
        ("top_p", -math.inf, "finite"),
        ("stop_token_ids", "ab", "list of token ids"),
        ("stop_token_ids", (1.5,), r"stop_token_ids\[0\] must be a whole number"),
        ("stop_token_ids", (-1,), r"stop_token_ids\[0\] must be at least 0"),
        ("stop_token_ids", 7, "list of token ids"),
        ("ignore_eos", "yes", "True or False"),
    ],
)
def test_bad_parameters_are_refused_at_the_door(name: str, value: object, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[5.5, 6], ["a"], [None], "abc", 5, None, [[1]], [1, -1], [10**9], [2**80], {1: 2}, b"ab"]
)
def test_bad_prompts_are_refused_at_the_door(prompt: Any) -> None:
    llm = make_llm()
    with pytest.raises(InputError):
        llm.engine.add_request(prompt, PARAMS, llm.resolve_pilot("ar"))
    with pytest.raises(InputError):
        llm.engine.add_request([1], "params", llm.resolve_pilot("ar"))  # type: ignore[arg-type]
    assert not llm.engine.has_work


def test_one_stop_string_stands_for_itself() -> None:
    assert SamplingParams(stop="wh").stop == ("wh",)
    assert SamplingParams(stop=["wh", "at"]).stop == ("wh", "at")


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_new_tokens=np.int64(4), temperature=np.float32(0.5), seed=np.uint32(3))
    assert params == SamplingParams(max_new_tokens=4, temperature=0.5, seed=3)
    llm = make_llm()
    pilot = llm.resolve_pilot("ar")
    request = llm.engine.make_request(np.array([3, 4]), params, pilot)
    assert request.prompt_ids == [3, 4] and all(type(token_id) is int for token_id in request.prompt_ids)


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1.2e-38, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(PROMPTS, PARAMS, pilot="ar", is_raw=True)
    params = replace(PARAMS, temperature=temperature, seed=5)
    found = llm.generate(PROMPTS, params, pilot="fixed:4", is_raw=True)
    assert [one.text for one in found] == [one.text for one in expected]


@pytest.mark.parametrize("top_p", [1e-46, 5e-324, 1e-30, 1e-9])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_top_p_below_every_probability_keeps_the_best_token(top_p: float, top_k: int) -> None:
    llm = make_llm(drafter=make_dflash())
    expected = llm.generate(PROMPTS, PARAMS, pilot="ar", is_raw=True)
    params = replace(PARAMS, temperature=1.3, top_p=top_p, top_k=top_k, seed=5)
    for pilot in ("ar", "tree:7"):
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [one.text for one in found] == [one.text for one in expected]


def spoil(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [PARAMS, replace(PARAMS, temperature=0.8), replace(PARAMS, temperature=1, top_p=0.5)]
)
@pytest.mark.parametrize("name", ["llama", "llama-int8"])
def test_scores_that_are_no_numbers_end_the_request(name: str, params: SamplingParams, value: float) -> None:
    llm = make_llm(name)
    spoil(llm.engine.runner.decoder.norm.weight, value)
    with pytest.raises(RequestFailedError, match="gives no finite scores for token 1 of the answer"):
        llm.generate("abc", params, is_raw=True)
    assert not llm.engine.has_work and llm.engine.runner.cache.num_free == llm.config.num_slots


@pytest.mark.parametrize("name", ["llama", "llama-int8"])
def test_scores_that_become_no_numbers_keep_the_text_before(name: str) -> None:
    llm = make_llm(name)
    whole = llm.generate("abc", PARAMS, is_raw=True)
    stream = llm.stream("abc", PARAMS, is_raw=True)
    shown = [next(stream).new_text for _ in range(5)]
    spoil(llm.engine.runner.decoder.norm.weight, math.nan)
    with pytest.raises(RequestFailedError, match="for token 7 of the answer") as caught:
        next(stream)
    assert caught.value.completions[0].token_ids == whole.token_ids[:6]
    assert whole.text.startswith("".join(shown)) and issubclass(RequestFailedError, BlockPilotError)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("pilot", ["fixed:4", "tree:9", "step"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "eagle3"])
@pytest.mark.parametrize("name", ["llama", "llama-int8"])
def test_a_drafter_of_no_numbers_costs_time_alone(name: str, kind: str, pilot: str, value: float) -> None:
    drafter = make_eagle3(name) if kind == "eagle3" else make_dflash(name, is_second=kind == "dflash2")
    for parameter in drafter.parameters():
        spoil(parameter, value)
    llm = make_llm(name, drafter=drafter, costs=StepCosts.linear())
    for params in (PARAMS, SAMPLED):
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        found = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
