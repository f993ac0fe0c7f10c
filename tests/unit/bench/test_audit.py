"""A difference is a near-tie where the scores say so, and a mismatch everywhere else."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockpilot import LLM, EngineConfig
from blockpilot.bench.answers import Answer
from blockpilot.bench.audit import GAPS, Difference, Place, find_differences, group_differences
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.plan import encode_turn
from blockpilot.decoding.target import PassResult, TargetRunner
from blockpilot.text.prompts import Prompt
from tests.tiny import make_placement
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


def audit(llm: LLM, plain: list[Answer], turn: int, token_ids: list[int], temperature: float = 0.0) -> list[Difference]:
    ours = [replace(answer, method="dflash:4") for answer in plain]
    ours[turn] = replace(ours[turn], token_ids=token_ids)
    return find_differences([*plain, *ours], {("quiz", "q0"): Place(PROMPT, SEED)}, llm, config(temperature))


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
    found = find_differences([*plain, *ours], {("quiz", "q0"): Place(PROMPT, SEED)}, llm, config(0.0))
    assert sorted((one.repeat, one.position) for one in found) == [(0, 3), (1, 6), (2, 3)]
    assert len(passes) == 2
    lines = {line["position"]: line["answers"] for line in group_differences(found)}
    assert lines == {3: {"dflash:4": [0, 2]}, 6: {"dflash:4": [1]}}


def test_where_a_coarse_dtype_finds_too_much_float32_decides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = chat_target()
    coarse = EngineConfig(num_slots=1, linear_backend="plain", dtype="bfloat16")
    llm = LLM(target, drafter=None, pilot="ar", config=coarse)
    plain = plain_answers(llm, 0.0)
    written = plain[0].token_ids
    scores = float32_scores(llm, encode_turn(llm.tokenizer, PROMPT, []) + written[:3])
    second = next(token_id for token_id in scores.argsort(descending=True).tolist() if token_id != written[3])
    wrong = [*written[:3], second, *written[4:]]
    expected = float(scores.max() - scores[[second, written[3]]].min())
    for most, is_near_tie in ((expected + 1e-4, True), (expected - 1e-4, False)):
        monkeypatch.setitem(GAPS, "bfloat16", most)
        prefill = llm.engine.runner.prefill

        def rounded(*given: Any, prefill: Any = prefill) -> PassResult:
            """A pass whose rounding favours the plain token by far."""
            result = prefill(*given)
            result.logits[0, written[3]] += 4
            return result

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "prefill", rounded)
            (found,) = audit(llm, plain, 0, wrong)
        assert found.gap is not None and found.gap > 3
        assert found.exact_gap == pytest.approx(expected, abs=1e-5) and found.is_near_tie is is_near_tie
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "prefill", rounded)
            patch.setattr("blockpilot.bench.audit.TargetRunner", run_out_of_memory)
            (found,) = audit(llm, plain, 0, wrong)
        assert found.exact_gap is None and not found.is_near_tie
        assert "judges in bfloat16 and not in float32: out of memory" in caplog.text


def run_out_of_memory(*given: Any, **options: Any) -> TargetRunner:
    raise MemoryError


def float32_scores(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Of the same weights: those of the run, which are rounded."""
    decoder = copy.deepcopy(llm.engine.runner.decoder).float()
    runner = TargetRunner(decoder, make_placement(1, 64))
    return runner.prefill([(runner.cache.reserve(), token_ids)], ()).logits[0]
