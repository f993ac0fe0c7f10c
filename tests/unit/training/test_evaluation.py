"""Evaluation on finished answers must give the very steps that decoding takes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training import evaluation
from blockpilot.training.evaluation import evaluate_drafter
from blockpilot.training.responses import Response, ResponseSet
from tests.tiny import make_decoder, make_dflash, make_eagle3, make_llm

PROMPTS = ["the quick brown fox", "abcabc", "Z", "speculation 0123"]


def reduced_dflash(*, is_second: bool) -> DFlash:
    model = make_dflash(is_second=is_second)
    model.draft_token_ids = torch.arange(0, 60, 2)
    return model


@pytest.mark.parametrize(
    ("make_drafter", "block_size"),
    [
        (partial(make_dflash, is_second=False), 8),
        (partial(make_dflash, is_second=True), 8),
        (partial(reduced_dflash, is_second=False), 8),
        (partial(reduced_dflash, is_second=True), 8),
        (partial(make_eagle3, has_embedding=False), 5),
        (partial(make_eagle3, has_embedding=True), 5),
    ],
)
def test_evaluation_walks_like_decoding(
    make_drafter: Callable[[], DFlash | Eagle3], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "ANCHORS_PER_PASS", 7)
    llm = make_llm(drafter=make_drafter())
    completions = llm.generate(
        PROMPTS, SamplingParams(max_new_tokens=60, ignore_eos=True), pilot=f"fixed:{block_size}", is_raw=True
    )
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [
        Response(ids + completion.token_ids, len(ids), source=place % 2)
        for place, (ids, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    responses = ResponseSet.from_responses(texts)
    responses.names = ("even", "odd")
    report = evaluate_drafter(
        make_drafter().eval(),
        make_decoder().eval(),
        responses,
        block_size=block_size,
        width=128,
        batch_size=3,
    )
    steps = [[step.emitted for step in completion.steps] for completion in completions]
    assert report.tau_mean == pytest.approx(sum(sum(s) / len(s) for s in steps) / len(steps))
    assert report.tau_pooled == pytest.approx(sum(map(sum, steps)) / sum(map(len, steps)))
    assert any(emitted > 1 for s in steps for emitted in s)
    counts = {"even": (len(steps) + 1) // 2, "odd": len(steps) // 2}
    total = sum(report.tau_by_source[name] * count for name, count in counts.items())
    assert total / len(steps) == pytest.approx(report.tau_loop_free, abs=1e-3)


@pytest.mark.parametrize("make_drafter", [make_eagle3, make_dflash])
def test_texts_too_short_for_a_draft_give_numbers(make_drafter: Callable[[], DFlash | Eagle3]) -> None:
    texts = ResponseSet.from_responses([Response([1, 2, 3, 4], 3), Response([5, 6], 2)])
    report = evaluate_drafter(make_drafter().eval(), make_decoder().eval(), texts, block_size=6, width=16)
    assert report.accuracy == [0.0] * 5
