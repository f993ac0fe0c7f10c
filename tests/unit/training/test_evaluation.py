"""Evaluation on finished answers must give the very steps that decoding takes."""

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.training import evaluation
from blockpilot.training.evaluation import evaluate_drafter
from blockpilot.training.responses import Response, ResponseSet
from tests.tiny import make_decoder, make_dflash, make_llm

PROMPTS = ["the quick brown fox", "abcabc", "Z", "speculation 0123"]


@pytest.mark.parametrize("head_size", [0, 30])
@pytest.mark.parametrize("is_second", [False, True])
def test_evaluation_walks_like_decoding(is_second: bool, head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "ANCHORS_PER_PASS", 7)

    def drafter():
        model = make_dflash(is_second=is_second)
        if head_size:
            model.draft_token_ids = torch.arange(0, 2 * head_size, 2)
        return model

    llm = make_llm(drafter=drafter())
    completions = llm.generate(
        PROMPTS, SamplingParams(max_new_tokens=60, ignore_eos=True), pilot="fixed:8", is_raw=True
    )
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [Response(ids + c.token_ids, len(ids)) for ids, c in zip(prompts, completions, strict=True)]
    responses = ResponseSet.from_responses(texts)
    report = evaluate_drafter(drafter().eval(), make_decoder().eval(), responses, block_size=8, width=128)
    steps = [[step.emitted for step in completion.steps] for completion in completions]
    assert report.tau_mean == pytest.approx(sum(sum(s) / len(s) for s in steps) / len(steps))
    assert report.tau_pooled == pytest.approx(sum(map(sum, steps)) / sum(map(len, steps)))
    assert any(emitted > 1 for s in steps for emitted in s)
