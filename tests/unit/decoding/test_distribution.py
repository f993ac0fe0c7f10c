"""Samples follow the target's distribution through drafts and trees; a broken verifier is caught by the same test.

The vocabulary is tiny, so the probability of every answer is known exactly. Many seeds through the whole engine give
counts of answers, and a chi-square test compares the two.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import scipy.stats
import torch

from blockpilot import SamplingParams
from blockpilot.core.config import EngineConfig
from blockpilot.core.records import Completion
from blockpilot.core.tree import DraftTree
from blockpilot.decoding import host_step
from blockpilot.decoding.sampling import filter_logits
from blockpilot.decoding.verification import Acceptance, accept
from blockpilot.engine.llm import LLM
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.loading import LoadedTarget
from tests.support import children_of, decoder_logits
from tests.tiny import CONFIGS, make_dflash, make_tokenizer

NUM_WORDS, PROMPT, ANSWER_LENGTH, NUM_ANSWERS = 4, [1, 3, 2], 4, 900
SAMPLING = {"T=1.5": {"temperature": 1.5}, "T=1 top-k": {"temperature": 1.0, "top_k": 3}}


def make_llm() -> LLM:
    torch.manual_seed(0)
    decoder = Decoder(replace(CONFIGS["llama-untied"], vocab_size=NUM_WORDS))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    shapes = make_dflash().config
    drafter = DFlash(replace(shapes, layers=replace(shapes.layers, vocab_size=NUM_WORDS), mask_token_id=0))
    torch.nn.init.constant_(drafter.norm.weight, 8.0)  # a drafter that is sure of itself, rightly or not
    target = LoadedTarget(decoder=decoder, tokenizer=make_tokenizer(), name="tiny", path=Path("tiny"))
    config = EngineConfig(num_slots=24, token_budget=128, linear_backend="plain")
    return LLM(target, drafter=drafter, config=config)  # type: ignore[arg-type]


def exact_probabilities(decoder: Decoder, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer, token after token, from the target's logits alone."""
    table = {(): 1.0}
    for _ in range(ANSWER_LENGTH):
        longer = {}
        for answer, probability in table.items():
            logits = decoder_logits(decoder, torch.tensor([*PROMPT, *answer]))[-1:]
            scores = filter_logits(logits.double() / params.temperature, params.top_k, params.top_p)
            for token_id, share in enumerate(scores.softmax(dim=-1)[0].tolist()):
                longer[(*answer, token_id)] = probability * share
        table = longer
    return table


def sample_answers(llm: LLM, pilot: str, params: SamplingParams) -> list[Completion]:
    each = [replace(params, seed=seed, max_new_tokens=ANSWER_LENGTH, ignore_eos=True) for seed in range(NUM_ANSWERS)]
    return llm.generate([PROMPT] * NUM_ANSWERS, each, pilot=pilot)


def chi_square_p(answers: Sequence[Completion], probabilities: dict[tuple[int, ...], float]) -> float:
    """p-value of the counts; answers expected less than five times are counted together."""
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    assert set(counts) <= {answer for answer, share in probabilities.items() if share > 0}
    frequent = [answer for answer, share in probabilities.items() if share * NUM_ANSWERS >= 5]
    observed = [counts[answer] for answer in frequent]
    expected = [probabilities[answer] * NUM_ANSWERS for answer in frequent]
    assert len(frequent) >= 10, "too few outcomes to say anything"
    observed.append(NUM_ANSWERS - sum(observed))
    expected.append(NUM_ANSWERS - sum(expected))
    return float(scipy.stats.chisquare(observed, expected, sum_check=False).pvalue)


def accept_wrong_tokens_sometimes(seed: int):
    """A verifier that lets one wrong draft in five pass."""
    draw = random.Random(seed)

    def lenient(tree: DraftTree, target_ids: Sequence[int]) -> Acceptance:
        forced = list(target_ids)
        for node, children in enumerate(children_of(tree)):
            if children and draw.random() < 0.2:
                forced[node] = next(iter(children))
        return accept(tree, forced)

    return lenient


def prefer_the_last_child(tree: DraftTree, target_ids: Sequence[int]) -> Acceptance:
    """A verifier that believes the drafter's last choice wherever there is more than one."""
    forced = [
        list(children)[-1] if len(children) > 1 else token_id
        for children, token_id in zip(children_of(tree), target_ids, strict=True)
    ]
    return accept(tree, forced)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_samples_follow_the_targets_distribution(sampling: str) -> None:
    params = SamplingParams(**SAMPLING[sampling])  # type: ignore[arg-type]
    llm = make_llm()
    probabilities = exact_probabilities(llm.engine.runner.decoder, params)
    assert sum(probabilities.values()) == pytest.approx(1.0)
    assert len(probabilities) == len(list(product(range(NUM_WORDS), repeat=ANSWER_LENGTH)))
    for pilot in ("ar", "fixed:4", "tree:9"):
        answers = sample_answers(llm, pilot, params)
        assert chi_square_p(answers, probabilities) > 1e-3, pilot
        num_steps = sum(answer.num_steps for answer in answers)
        if pilot != "ar":
            assert num_steps < 0.9 * NUM_ANSWERS * (ANSWER_LENGTH - 1), "drafts were accepted, so they were tested"


@pytest.mark.parametrize(
    ("broken", "pilot"),
    [(accept_wrong_tokens_sometimes(1), "fixed:4"), (prefer_the_last_child, "tree:16")],
    ids=["accepts any draft at times", "accepts another choice"],
)
def test_a_broken_verifier_fails_the_same_test(broken, pilot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.5)
    llm = make_llm()
    probabilities = exact_probabilities(llm.engine.runner.decoder, params)
    monkeypatch.setattr(host_step, "accept", broken)
    assert chi_square_p(sample_answers(llm, pilot, params), probabilities) < 1e-4
