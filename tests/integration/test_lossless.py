"""The promise: whatever drafts and whatever decides, the answer is the one plain decoding gives, token for token."""

import pytest
import torch

from blockpilot import SamplingParams, load_pilot
from tests.tiny import (
    ARCHITECTURES,
    CODED,
    CONTEXT_LENGTH,
    RandomTreePilot,
    ScriptedDrafter,
    make_dflash,
    make_eagle3,
    make_llm,
)

PROMPTS = ["the quick brown fox", "abcabcabcabcabcabc", "Z", "speculation is cheap and proof is dear 0123"]
SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=24, ignore_eos=True),
    "T=0.7": SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7, seed=11),
    "T=1 top-p": SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.0, top_p=0.9, seed=5),
    "T=1 top-k": SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.3, top_k=7, seed=5),
}
PILOTS = ["fixed:2", "fixed:5", "fixed:16", "fixed:64", "tree:1", "tree:7", "tree:40", "tree:128"]
DRAFTERS = ["dflash", "dflash2", "ngram"]
TARGETS = (*ARCHITECTURES, *CODED)
EAGLE3_TARGETS = ["llama3-rope", "qwen3", "qwen3_moe", "llama-int8"]  # each drafted token is a pass: fewer cases


def build(architecture: str, drafter: str):
    if drafter == "eagle3":
        return make_llm(architecture, drafter=make_eagle3(architecture))
    model = "ngram" if drafter == "ngram" else make_dflash(architecture, is_second=drafter == "dflash2")
    return make_llm(architecture, drafter=model)


@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [(architecture, drafter) for architecture in TARGETS for drafter in DRAFTERS]
    + [(architecture, "eagle3") for architecture in EAGLE3_TARGETS],
)
def test_every_pilot_gives_the_plain_answer(architecture: str, drafter: str) -> None:
    llm = build(architecture, drafter)
    for params in SAMPLING.values():
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        for spec in PILOTS:
            drafted = llm.generate(PROMPTS, params, pilot=spec, is_raw=True)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in plain], (spec, params)
            assert all(c.num_tokens == 1 + sum(step.emitted for step in c.steps) for c in drafted)
    assert llm.engine.runner.cache.num_free == 4


@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [(architecture, drafter) for architecture in TARGETS for drafter in ("dflash", "dflash2")]
    + [("qwen3", "eagle3"), ("qwen3-int8", "eagle3")],
)
def test_random_trees_and_mixed_shapes_in_one_batch(architecture: str, drafter: str) -> None:
    llm = build(architecture, drafter)
    for params in SAMPLING.values():
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        for seed in range(3):
            mixed = [RandomTreePilot(seed), load_pilot("fixed:6"), load_pilot("ar"), load_pilot("tree:12")]
            drafted = llm.generate(PROMPTS, params, pilot=mixed, is_raw=True)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe-int8"])
def test_more_requests_than_slots_with_different_sampling(architecture: str) -> None:
    llm = build(architecture, "dflash")
    prompts = [text[: 3 + 2 * index] for index, text in enumerate(PROMPTS * 3)]
    params = [list(SAMPLING.values())[index % 4] for index in range(len(prompts))]
    alone = [
        llm.generate([p], one, pilot="ar", is_raw=True)[0].token_ids for p, one in zip(prompts, params, strict=True)
    ]
    together = llm.generate(prompts, params, pilot="tree:9", is_raw=True)
    assert [c.token_ids for c in together] == alone


@pytest.mark.parametrize("architecture", CODED)
def test_8_bit_integers_answer_alike_in_every_engine(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However prompts are cut, whoever shares a pass, with any number of threads; a drafter may be there or not."""
    answers = []
    for settings in ({"token_budget": 3}, {"num_slots": 1}, {"token_budget": 512}):
        for num_threads, drafter in ((1, None), (3, make_dflash(architecture))):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
            llm = make_llm(architecture, drafter=drafter, **settings)  # type: ignore[arg-type]
            assert llm.is_exact and llm.engine.runner.kernels.num_threads == num_threads  # type: ignore[attr-defined]
            found = [llm.generate(PROMPTS, params, is_raw=True) for params in SAMPLING.values()]
            answers.append([completion.token_ids for completions in found for completion in completions])
    assert all(one == answers[0] for one in answers)


@pytest.mark.parametrize("shift", [0, 1])
def test_drafters_that_are_always_right_or_always_wrong(shift: int) -> None:
    params = SAMPLING["greedy"]
    plain = make_llm().generate(PROMPTS, params, is_raw=True)
    tokenizer = make_llm().tokenizer
    answers = {tuple(tokenizer.encode(p)): c.token_ids for p, c in zip(PROMPTS, plain, strict=True)}
    llm = make_llm(drafter=ScriptedDrafter(answers, shift=shift))
    drafted = llm.generate(PROMPTS, params, pilot="fixed:8", is_raw=True)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    emitted = [step.emitted for completion in drafted for step in completion.steps[:-1]]
    assert set(emitted) == ({8} if shift == 0 else {1})


@pytest.mark.parametrize("pilot", ["fixed:8", "fixed:16", "tree:20"])
@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens_inside_a_block(pilot: str, limit: int) -> None:
    check_against_plain(SamplingParams(max_new_tokens=limit, ignore_eos=True), pilot)


@pytest.mark.parametrize("pilot", ["fixed:8", "fixed:16", "tree:20"])
def test_stops_inside_a_block(pilot: str) -> None:
    text = make_llm().generate(PROMPTS[:1], SamplingParams(max_new_tokens=40, ignore_eos=True), is_raw=True)[0].text
    for start in range(1, 20):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(text[start : start + 2], "~never~"))
        completion = check_against_plain(params, pilot)
        assert completion.finish_reason == "stop"
        assert text.startswith(completion.text) and params.stop[0] not in completion.text


@pytest.mark.parametrize("pilot", ["fixed:8", "tree:20"])
def test_stop_token_and_eos_inside_a_block(pilot: str) -> None:
    ids = make_llm().generate(PROMPTS[:1], SamplingParams(max_new_tokens=40, ignore_eos=True), is_raw=True)[0].token_ids
    for token_id in sorted(set(ids)):
        completion = check_against_plain(
            SamplingParams(max_new_tokens=40, ignore_eos=True, stop_token_ids=(token_id,)), pilot
        )
        assert completion.token_ids == ids[: ids.index(token_id) + 1] and completion.finish_reason == "stop"
    llm = oracle_llm(PROMPTS[0], SamplingParams(max_new_tokens=40, ignore_eos=True))
    llm.engine.eos_token_ids = frozenset({ids[9]})
    completion = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=40), pilot=pilot, is_raw=True)
    assert completion.token_ids == ids[: ids.index(ids[9]) + 1] and completion.finish_reason == "stop"


@pytest.mark.parametrize("pilot", ["fixed:8", "fixed:64", "tree:40"])
@pytest.mark.parametrize("room", [1, 2, 3, 9, 30])
def test_blocks_crossing_the_context_limit(pilot: str, room: int) -> None:
    prompt = ("abcdefgh" * 40)[: CONTEXT_LENGTH - room]
    params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    completion = check_against_plain(params, pilot, prompt)
    assert completion.num_tokens == room and completion.finish_reason == "length"


def oracle_llm(prompt: str, params: SamplingParams):
    """An engine whose drafter knows the plain answer, so that blocks really run past every limit."""
    plain = make_llm()
    answer = plain.generate([prompt], SamplingParams(max_new_tokens=400, ignore_eos=True), is_raw=True)[0]
    return make_llm(drafter=ScriptedDrafter({tuple(plain.tokenizer.encode(prompt)): answer.token_ids}))


def check_against_plain(params: SamplingParams, pilot: str, prompt: str = PROMPTS[0]):
    plain = make_llm().generate(prompt, params, is_raw=True)
    for llm in (oracle_llm(prompt, params), make_llm(drafter=make_dflash())):
        drafted = llm.generate(prompt, params, pilot=pilot, is_raw=True)
        assert (drafted.token_ids, drafted.text, drafted.finish_reason) == (
            plain.token_ids,
            plain.text,
            plain.finish_reason,
        )
        assert llm.engine.runner.cache.num_free == 4
    return drafted


@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "eagle3"])
def test_packed_weights_and_a_rounded_drafter_change_no_token(drafter: str) -> None:
    models = {"dflash": make_dflash(), "dflash2": make_dflash(is_second=True), "eagle3": make_eagle3()}
    llm = make_llm(drafter=models[drafter], linear_backend="auto")
    for params in (SAMPLING["greedy"], SAMPLING["T=1 top-p"]):
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        for pilot in ("fixed:4", "fixed:12", "tree:3@4", "tree:20"):
            drafted = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in plain], pilot
