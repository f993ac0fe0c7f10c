"""A difference is a near-tie where a judge's scores say so, and a mismatch everywhere else."""

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, EngineConfig
from blockpilot.bench.answers import Answer
from blockpilot.bench.audit import Difference, Judge, Place, find_differences, group_differences
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.plan import encode_turn
from blockpilot.text.prompts import Prompt
from tests.unit.bench.pieces import make_answer
from tests.unit.training.pieces import chat_target

PROMPT = Prompt("q0", "what is", ("and then",))
SEED = 7


def twin_llm(token_id: int, twin_id: int) -> LLM:
    """A model to which two tokens are the same."""
    target = chat_target()
    with torch.no_grad():
        target.decoder.embed_tokens.weight[twin_id] = target.decoder.embed_tokens.weight[token_id]
    return LLM(target, drafter=None, pilot="ar", config=EngineConfig(num_slots=1, linear_backend="plain"))


def config(temperature: float) -> BenchConfig:
    return BenchConfig(tasks=("quiz",), methods=("ar", "dflash:4"), max_new_tokens=8, temperature=temperature)


def plain_answers(llm: LLM, temperature: float) -> list[Answer]:
    answers, replies = [], []
    for turn in range(2):
        ids = encode_turn(llm.tokenizer, PROMPT, replies)
        found = llm.generate([ids], config(temperature).params(SEED))[0]
        replies.append(found.text)
        answers.append(make_answer([1] * 7, token_ids=found.token_ids, text=found.text, turn=turn))
    return answers


def make_judge(llm: LLM, temperature: float = 0.0) -> Judge:
    return Judge(llm, config(temperature), {("quiz", "q0"): Place(PROMPT, SEED)})


def audit(llm: LLM, plain: list[Answer], turn: int, token_ids: list[int], temperature: float = 0.0) -> list[Difference]:
    ours = [replace(answer, method="dflash:4") for answer in plain]
    ours[turn] = replace(ours[turn], token_ids=token_ids)
    return find_differences([*plain, *ours], plain, make_judge(llm, temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("turn", [0, 1])
def test_near_tie_and_mismatch(temperature: float, turn: int) -> None:
    llm = twin_llm(5, 5)
    plain = plain_answers(llm, temperature)
    written = plain[turn].token_ids
    assert audit(llm, plain, turn, written, temperature) == []
    wrong = [*written[:3], (written[3] + 1) % 60, *written[4:]]
    (found,) = audit(llm, plain, turn, wrong, temperature)
    assert (found.turn, found.position, found.is_near_tie) == (turn, 3, False)
    assert found.gap is not None and found.gap > 1e-4


def test_two_tokens_with_one_score_tie() -> None:
    llm = twin_llm(5, 5)
    written = plain_answers(llm, 0.0)[0].token_ids
    used = {*written, *encode_turn(llm.tokenizer, PROMPT, [])}
    twin = next(token_id for token_id in range(1, 60) if token_id not in used)
    llm = twin_llm(written[0], twin)
    plain = plain_answers(llm, 0.0)
    first = plain[0].token_ids[0]
    assert first in (written[0], twin)
    (found,) = audit(llm, plain, 0, [written[0] + twin - first, *plain[0].token_ids[1:]])
    assert found.is_near_tie and found.gap == pytest.approx(0, abs=1e-5) and found.position == 0


def test_a_text_that_ends_early_is_a_mismatch() -> None:
    llm = twin_llm(5, 5)
    plain = plain_answers(llm, 0.0)
    (found,) = audit(llm, plain, 1, plain[1].token_ids[:-2])
    assert (found.gap, found.is_near_tie, found.position) == (None, False, len(plain[1].token_ids) - 2)


def test_answers_that_part_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = twin_llm(5, 5)
    plain = plain_answers(llm, 0.0)
    written = plain[0].token_ids
    wrong = [*written[:3], (written[3] + 1) % 60, *written[4:]]
    late = [*written[:6], (written[6] + 1) % 60]
    ours = [
        replace(answer, method="dflash:4", repeat=repeat, token_ids=answer.token_ids if answer.turn else token_ids)
        for repeat, token_ids in enumerate((wrong, late, wrong))
        for answer in plain
    ]
    passes = []
    prefill = llm.engine.runner.prefill
    monkeypatch.setattr(llm.engine.runner, "prefill", lambda *given: passes.append(given) or prefill(*given))
    found = find_differences([*plain, *ours], plain, make_judge(llm))
    assert sorted((one.repeat, one.position) for one in found) == [(0, 3), (1, 6), (2, 3)]
    assert len(passes) == 2
    lines = {line["position"]: line["answers"] for line in group_differences(found)}
    assert lines == {3: {"dflash:4": [0, 2]}, 6: {"dflash:4": [1]}}


def test_an_exact_engine_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every difference is a mismatch with its position, also where two tokens have one score."""
    llm = twin_llm(5, 5)
    plain = plain_answers(llm, 0.0)
    written = plain[0].token_ids
    wrong = [*written[:3], (written[3] + 1) % 60, *written[4:]]
    monkeypatch.setattr(llm.engine.runner, "prefill", None)  # no pass is made
    ours = [replace(answer, method="dflash:4", token_ids=ids) for answer, ids in zip(plain, (wrong, [1]), strict=True)]
    short = replace(plain[0], method="tree:3", token_ids=written[:-2])
    found = find_differences([*plain, *ours, short], plain, None)
    assert found == [
        Difference("quiz", "dflash:4", "q0", 0, 0, 3, gap=None, is_near_tie=False),
        Difference("quiz", "tree:3", "q0", 0, 0, len(written) - 2, gap=None, is_near_tie=False),
    ]
