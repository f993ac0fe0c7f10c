"""Penalties, biases, min-p and log-probabilities: what they say, and the same text under every pilot."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.core.errors import InputError
from blockpilot.decoding.adjusting import score_tokens
from blockpilot.models.noise import gumbel_noise
from tests.support import decoder_logits
from tests.tiny import VOCAB_SIZE, make_decoder, make_dflash, make_eagle3, make_llm

PROMPTS = ["abc", "hello there", "the quick brown fox"]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=4)
ASKED = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {5: 6.0, 9: -100.0, 11: 3.5}},
    "all": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {3: 2.0}},
}


def write_plainly(prompt_ids: list[int], params: SamplingParams) -> list[int]:
    """Token by token, from the definitions."""
    decoder, output = make_decoder(), list[int]()
    while len(output) < params.max_new_tokens:
        scores = decoder_logits(decoder, torch.tensor(prompt_ids + output))[-1].clone()
        for token_id in range(VOCAB_SIZE):
            if token_id in prompt_ids + output:
                factor = params.repetition_penalty
                scores[token_id] = scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
            count = output.count(token_id)
            scores[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            scores[token_id] += dict(params.logit_bias).get(token_id, 0.0)
        if not params.is_greedy:
            shares = (scores / params.temperature).softmax(-1)
            allowed = shares >= params.min_p * shares.max()
            noise = gumbel_noise(params.seed, [len(prompt_ids) + len(output)], vocab_size=VOCAB_SIZE)[0]
            scores = torch.where(allowed, scores / params.temperature + noise, -torch.inf)
        output.append(int(scores.argmax()))
    return output


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_tokens_follow_the_definition(asked: dict[str, Any], base: SamplingParams) -> None:
    llm = make_llm()
    params = replace(base, **asked)
    found = llm.generate(PROMPTS[1], params, is_raw=True).token_ids
    assert found == write_plainly(llm.tokenizer.encode(PROMPTS[1]), params)
    assert found != llm.generate(PROMPTS[1], base, is_raw=True).token_ids


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_leaves_out_what_is_unlikely(min_p: float) -> None:
    llm = make_llm()
    params = replace(SAMPLED, min_p=min_p, temperature=1.5)
    found = llm.generate(PROMPTS[1], params, is_raw=True).token_ids
    assert found == write_plainly(llm.tokenizer.encode(PROMPTS[1]), params)
    if min_p == 1:
        assert found == llm.generate(PROMPTS[1], GREEDY, is_raw=True).token_ids


@pytest.mark.parametrize("name", ["llama", "llama-int8"])
@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "eagle3", "ngram"])
@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_pilot_writes_the_same(base: SamplingParams, drafter: str, name: str) -> None:
    makers: dict[str, Any] = {"eagle3": lambda: make_eagle3(name), "ngram": lambda: "ngram"}
    make = makers.get(drafter, lambda: make_dflash(name, is_second=drafter == "dflash2"))
    llm = make_llm(name, drafter=make())
    everything = [replace(base, **asked) for asked in ASKED.values()] + [replace(base, min_p=0.1), base]
    prompts = [PROMPTS[place % 3] for place in range(len(everything))]
    expected = [
        llm.generate(prompt, one, pilot="ar", is_raw=True) for prompt, one in zip(prompts, everything, strict=True)
    ]
    for pilot in ("fixed:5", "tree:9"):
        found = llm.generate(prompts, everything, pilot=pilot, is_raw=True)  # in batches, beside each other
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.text for one in found] == [one.text for one in expected]


@pytest.mark.parametrize("pilot", ["ar", "fixed:5", "tree:9"])
@pytest.mark.parametrize(
    "base", [GREEDY, SAMPLED, replace(GREEDY, logit_bias={5: 6.0})], ids=["greedy", "sampled", "bias"]
)
def test_log_probabilities_are_the_targets_own(base: SamplingParams, pilot: str) -> None:
    llm = make_llm(drafter=make_dflash())
    found = llm.generate(PROMPTS[0], replace(base, logprobs=3), pilot=pilot, is_raw=True)
    assert found.token_ids == llm.generate(PROMPTS[0], base, pilot="ar", is_raw=True).token_ids
    prompt_ids = llm.tokenizer.encode(PROMPTS[0])
    logits = decoder_logits(make_decoder(), torch.tensor(prompt_ids + found.token_ids))[len(prompt_ids) - 1 : -1]
    expected = score_tokens(logits, found.token_ids, 3)
    assert [one.token_id for one in found.scores] == found.token_ids
    for ours, theirs in zip(found.scores, expected, strict=True):
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
        assert [score for _, score in ours.best] == pytest.approx([score for _, score in theirs.best], abs=1e-4)
        assert ours.best[0][0] == ours.token_id or ours.log_prob <= ours.best[0][1]


@pytest.mark.parametrize("pilot", ["ar", "tree:9"])
def test_scores_end_with_the_answer(pilot: str) -> None:
    """Also where a step emits more than the answer takes."""
    llm = make_llm(drafter=make_dflash())
    for params in (replace(GREEDY, max_new_tokens=7), replace(GREEDY, stop=("e",)), replace(GREEDY, max_new_tokens=1)):
        found = llm.generate(PROMPTS[2], replace(params, logprobs=0), pilot=pilot, is_raw=True)
        assert [one.token_id for one in found.scores] == found.token_ids
        assert all(one.best == () for one in found.scores)
    assert llm.generate(PROMPTS[2], GREEDY, pilot=pilot, is_raw=True).scores == []


BAD: Sequence[tuple[str, Any, str]] = [
    ("min_p", 1.5, "between 0 and 1"),
    ("presence_penalty", 3, "between -2 and 2"),
    ("frequency_penalty", "1", "must be a number"),
    ("repetition_penalty", 0, "between 0.01 and 10"),
    ("logit_bias", {5: 101}, "lie between -100 and 100"),
    ("logit_bias", {5: None}, "must be a number"),
    ("logit_bias", {"a": 1}, "whole number"),
    ("logit_bias", [5], "must map token ids"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "1024 are allowed"),
    ("logprobs", 21, "at most 20"),
    ("logprobs", True, "whole number"),
]


@pytest.mark.parametrize(("name", "value", "complaint"), BAD)
def test_bad_values_are_refused(name: str, value: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        SamplingParams(**{name: value})


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    llm = make_llm()
    with pytest.raises(InputError, match=f"logit_bias names token {VOCAB_SIZE}, outside the vocabulary"):
        llm.generate("abc", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), is_raw=True)
