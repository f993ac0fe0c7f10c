"""The real default model: our greedy text is the text of `transformers`, and drafting does not change it.

A difference between two greedy answers counts as a near-tie where the two best logits lie within 1e-4 of each other:
kernels of different shapes round differently. Anything else is a bug.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot import LLM, EngineConfig, SamplingParams
from blockpilot.cpu.first_difference import find_difference
from blockpilot.decoding.probe import ProbeSizes, probe
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.export import export_target
from blockpilot.models.loading import LoadedTarget, load_target
from blockpilot.models.presets import fetch_preset
from tests.support import decoder_logits, reference_logits

pytestmark = pytest.mark.real_model

NAME = "smollm2-135m"
NEAR_TIE = 1e-4
EOS_ID = 2
NUM_TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that tests whether a number is prime.",
    "Explain why the sky is blue in two sentences.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "List five uses of a paperclip.",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
    "Write a haiku about the sea.",
    "Who wrote 'Pride and Prejudice'?",
    "Summarise the plot of Romeo and Juliet.",
    "What is 17 * 23? Show your steps.",
    "Give me a recipe for pancakes.",
    "Write a short e-mail declining a meeting.",
    "def fibonacci(n):",
    "What are the symptoms of a cold?",
    "Describe photosynthesis to a child.",
    "Repeat the word 'banana' ten times.",
    "SELECT name FROM users WHERE",
    "¿Cuál es la capital de España?",
    "Name three differences between cats and dogs. Use bullet points.",
    "x",
]


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # workers side by side share the cores
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """Plain weights, never packed: the referee of near-ties and the source of token ids."""
    return load_target(NAME, torch.float32)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = export_target(NAME, tmp_path_factory.mktemp("export") / "smollm2")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_draft_model(target: LoadedTarget) -> DFlash:
    """An untrained drafter of the default's shapes: whatever it proposes, the text must not change."""
    torch.manual_seed(0)
    shapes = replace(target.decoder.config, architecture="qwen3", num_layers=1, intermediate_size=256)
    return DFlash(
        DFlashConfig(
            layers=shapes,
            block_size=16,
            mask_token_id=5,
            tap_layers=(8, 20),
            num_target_layers=target.decoder.config.num_layers,
        )
    ).eval()


def count_near_ties(
    target: LoadedTarget,
    prompts: Sequence[list[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> int:
    """Answers that part at a near-tie; an answer that parts anywhere else fails the test. Counting ends there."""
    num_ties = 0
    for prompt_ids, one, other in zip(prompts, ours, theirs, strict=True):
        if list(one) == list(other):
            continue
        both = zip(one, other, strict=False)
        place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
        best = decoder_logits(target.decoder, torch.tensor([*prompt_ids, *one[:place]]))[-1].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < NEAR_TIE, f"token {place} of {prompt_ids[:8]}... differs although the best logits lie {gap} apart"
        num_ties += 1
    return num_ties


def transformers_answers(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy `generate` on one left-padded batch; each answer ends with its first eos."""
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[EOS_ID] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    out = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=EOS_ID)
    answers = [row[width:].tolist() for row in out]
    return [ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids for ids in answers]


def test_greedy_text_equals_transformers(
    target: LoadedTarget, reference: Any, record_property: Callable[[str, object], None]
) -> None:
    prompts = [target.tokenizer.encode_chat(prompt) for prompt in PROMPTS]
    llm = LLM(NAME, config=EngineConfig(num_slots=10, context_length=256, dtype="float32"))
    completions = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    ours = [completion.token_ids for completion in completions]
    assert sum(len(ids) for ids in ours) > 800, "answers this short prove little"
    assert len({tuple(ids) for ids in ours}) == len(PROMPTS)
    num_ties = count_near_ties(target, prompts, ours, transformers_answers(reference, prompts))
    record_property("near_ties", num_ties)
    assert num_ties <= 1


def test_8_bit_integers_are_the_default_and_choose_nearly_the_same_tokens(target: LoadedTarget, reference: Any) -> None:
    """Behind the same tokens."""
    llm = LLM(NAME, drafter=None, config=EngineConfig(num_slots=1, context_length=256))
    assert llm.config.dtype == "int8" and llm.is_exact
    same = total = 0
    for prompt in PROMPTS[:3]:
        ids = target.tokenizer.encode_chat(prompt)
        answer = llm.generate([ids], SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))[0].token_ids
        logits = reference_logits(reference, torch.tensor([*ids, *answer[:-1]]))[len(ids) - 1 :]
        same += int((logits.argmax(dim=-1) == torch.tensor(answer)).sum())
        total += len(answer)
    assert same >= 0.95 * total


def test_all_passes_in_8_bit_integers_have_the_same_bits() -> None:
    llm = LLM(NAME, drafter=None, config=EngineConfig(num_slots=3, context_length=300))
    sizes = ProbeSizes(
        text=70,
        starts=(1, 60),
        trees=(16,),
        chains=(9,),
        cuts=(7, 70),
        pieces=4,
        batches=(2,),
        short_texts=(30, 5),
        drafts=(9, 3),
    )
    found = probe(llm.engine.runner, find_difference, sizes=sizes)
    assert found.difference is None and found.num_differing == 0 == found.num_not_finite
    assert all(counts.rows > 4 for counts in found.kinds.values())


def test_logits_match_transformers(target: LoadedTarget, reference: Any) -> None:
    for prompt in (PROMPTS[1], PROMPTS[17]):
        ids = torch.tensor(target.tokenizer.encode_chat(prompt))
        difference = (decoder_logits(target.decoder, ids) - reference_logits(reference, ids)).abs().max()
        assert difference < 1e-4


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize(("drafter", "pilot"), [("ngram", "fixed:8"), ("dflash", "fixed:16"), ("dflash", "tree:31")])
def test_drafting_does_not_change_the_text(target: LoadedTarget, drafter: str, pilot: str, dtype: str) -> None:
    prompts = [target.tokenizer.encode_chat(PROMPTS[index]) for index in (1, 15)]
    params = SamplingParams(max_new_tokens=48)
    config = EngineConfig(num_slots=2, context_length=256, dtype=dtype)
    llm = LLM(NAME, drafter=make_draft_model(target) if drafter == "dflash" else drafter, config=config)
    plain = [completion.token_ids for completion in llm.generate(prompts, params, pilot="ar")]
    drafted = [completion.token_ids for completion in llm.generate(prompts, params, pilot=pilot)]
    assert [len(ids) for ids in plain] == [48, 48]
    assert count_near_ties(target, prompts, plain, drafted) == 0
    assert llm.is_exact == (dtype == "int8")


def test_weights_and_tokens_equal_an_independent_reading_of_the_gguf_file(target: LoadedTarget) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF files")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(fetch_preset(NAME))
    options = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    for prompt in (*PROMPTS, "  two  spaces\n\n\tand 12345 digits", "e\u0301 😀 漢字"):
        assert tokenizer(prompt, add_special_tokens=False).input_ids == target.tokenizer.encode(prompt)
    ids = torch.tensor(target.tokenizer.encode_chat(PROMPTS[2]))
    assert (decoder_logits(target.decoder, ids) - reference_logits(model, ids)).abs().max() < 1e-4
