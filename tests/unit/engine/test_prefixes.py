"""Prefix reuse: fewer tokens are read, and the answers are those of an engine that reads everything."""

import random
from typing import Any

import pytest

from blockpilot import LLM, SamplingParams
from blockpilot.core.records import Completion
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.step import StepPilot
from tests.tiny import VOCAB_SIZE, make_dflash, make_eagle3, make_llm

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def draw(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1, VOCAB_SIZE) for _ in range(count)]


def build(name: str, drafter: str, *, is_reusing: bool) -> LLM:
    makers: dict[str, Any] = {"eagle3": lambda: make_eagle3(name), "ngram": lambda: "ngram", "none": lambda: None}
    make = makers.get(drafter, lambda: make_dflash(name, is_second=drafter == "dflash2"))
    return make_llm(name, drafter=make(), reuses_prefixes=is_reusing)


def talk(llm: LLM, pilot: str, turns: int = 4) -> list[Completion]:
    """Every turn begins with all that was said before, as it was generated."""
    said, answers = draw(0, 20), []
    for turn in range(turns):
        (answer,) = llm.generate([said], PARAMS, pilot=pilot)
        answers.append(answer)
        said = [*said, *answer.token_ids, *draw(turn + 1, 5)]
    return answers


@pytest.mark.parametrize("name", ["llama-int8", "qwen3-int8", "qwen3_moe-int8", "llama"])
@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "ngram", "none"])
def test_turns_of_a_chat_are_not_read_again(name: str, drafter: str) -> None:
    for pilot in ("ar",) if drafter == "none" else ("ar", "fixed:5", "tree:9"):
        fresh = talk(build(name, drafter, is_reusing=False), pilot)
        found = talk(build(name, drafter, is_reusing=True), pilot)
        assert [one.token_ids for one in found] == [one.token_ids for one in fresh]
        assert [[step.emitted for step in one.steps] for one in found] == [
            [step.emitted for step in one.steps] for one in fresh
        ], "the drafter knows as much"
        assert [one.num_reused_tokens for one in fresh] == [0] * 4
        lengths = [one.num_prompt_tokens for one in found]
        assert [one.num_reused_tokens for one in found] == [0, *(length + 11 for length in lengths[:-1])]


def test_a_drafter_that_has_not_seen_the_text_is_shown_it() -> None:
    llm = build("llama-int8", "dflash", is_reusing=True)
    said = draw(0, 30)
    assert llm.generate([said], PARAMS, pilot="ar")[0].num_reused_tokens == 0
    drafted = llm.generate([said], PARAMS, pilot="fixed:5")[0]
    assert drafted.num_reused_tokens == 0
    assert llm.generate([said], PARAMS, pilot="fixed:5")[0].num_reused_tokens == 29, "the last one's logits are needed"
    assert llm.generate([said], PARAMS, pilot="ar")[0].num_reused_tokens == 29


def test_eagle3_reads_everything() -> None:
    llm = build("llama-int8", "eagle3", is_reusing=True)
    plain = talk(build("llama-int8", "none", is_reusing=False), "ar")
    found = talk(llm, "fixed:5")
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert [one.num_reused_tokens for one in found] == [0] * 4


def test_slots_that_others_have_used_are_not_trusted() -> None:
    llm = build("llama-int8", "dflash", is_reusing=True)
    said = draw(0, 30)
    plain = llm.generate([said], PARAMS, pilot="fixed:5")[0]
    slots = [llm.engine.runner.cache.reserve() for _ in range(4)]  # as whoever measures step costs does
    for slot in slots:
        llm.engine.runner.prefill([(slot, draw(9, 40))], ())
        llm.engine.runner.cache.free(slot)
    again = llm.generate([said], PARAMS, pilot="fixed:5")[0]
    assert again.num_reused_tokens == 0 and again.token_ids == plain.token_ids


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_in_batches(seed: int) -> None:
    """Shared beginnings, branches, aborted and short ones; more conversations than slots."""
    choose = random.Random(seed)
    fresh, reusing = (build("llama-int8", "dflash2", is_reusing=flag) for flag in (False, True))
    talks = [draw(number % 3, choose.randint(10, 40)) for number in range(7)]
    num_reused = 0
    for _ in range(12):
        picks = choose.sample(range(len(talks)), choose.randint(1, 6))
        prompts = [talks[pick][:120] for pick in picks]
        params = [SamplingParams(max_new_tokens=choose.randint(1, 14), ignore_eos=True) for _ in picks]
        pilot = choose.choice(["ar", "fixed:4", "tree:9"])
        expected = fresh.generate(prompts, params, pilot=pilot)
        found = reusing.generate(prompts, params, pilot=pilot)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        num_reused += sum(one.num_reused_tokens for one in found)
        for pick, prompt, one in zip(picks, prompts, found, strict=True):
            cut = choose.choice([0, 0, 0, 7])
            talks[pick] = [*prompt, *one.token_ids][: len(prompt) + one.num_tokens - cut] + draw(pick, 4)
        if choose.random() < 0.3:
            stream = reusing.stream(prompts[0], PARAMS, pilot=pilot)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
    assert num_reused > 100
    assert reusing.engine.runner.cache.num_free == 4


def test_prompts_read_late_change_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drafter proposes does not depend on when it has read a prompt, in pieces or behind an earlier text."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, keeps_trees=True)
    found = []
    for is_late in (False, True):
        monkeypatch.setattr(StepPilot, "rests", lambda self, neighbours, is_late=is_late: is_late)
        costs = StepCosts.linear(slope=0.001)
        llm = make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), costs=costs, reuses_prefixes=True)
        prompts, answers = [draw(seed, 20 + 9 * seed) for seed in range(3)], []
        for _ in range(2):
            answers += llm.generate(prompts, params, pilot="auto")
            prompts = [[*one, *answer.token_ids] for one, answer in zip(prompts, answers[-3:], strict=True)]
        assert answers[-1].num_reused_tokens and any(step.block_size > 1 for step in answers[-1].steps)
        found.append([(one.token_ids, [step.tree for step in one.steps]) for one in answers])
    assert found[0] == found[1]
