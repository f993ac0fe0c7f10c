"""The real Qwen2.5-Coder-1.5B, where it is at hand: `blockpilot models fetch qwen2.5-coder-1.5b` brings 1.1 GB."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockpilot import LLM, EngineConfig, SamplingParams
from blockpilot.cpu.first_difference import find_difference
from blockpilot.decoding.probe import ProbeSizes, probe
from blockpilot.models.loading import load_target
from blockpilot.models.presets import list_presets
from tests.support import decoder_logits, reference_logits

pytestmark = pytest.mark.real_model

NAME = "qwen2.5-coder-1.5b"
PROMPT = "Write a Python function that adds two numbers."
TEXTS = [  # composed: transformers' reading of a GGUF file lacks the normaliser that the model's tokenizer has
    PROMPT,
    "Hello 12345 world, 3.14159!",
    "  two  spaces\n\n\tand 12345 digits",
    "é 😀 漢字 हिन्दी",
    "def f(x):\n    return x  # two\n\n\tend",
]


@pytest.fixture(scope="module")
def path(own_cache: None) -> Path:
    found = next(row["path"] for row in list_presets() if row["name"] == NAME)
    if found is None:
        pytest.skip(f"{NAME} is not on this machine: blockpilot models fetch {NAME}")
    return Path(found)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield LLM(str(path), config=EngineConfig(num_slots=6, context_length=512))
    torch.set_num_threads(before)


def test_logits_and_tokens_equal_an_independent_reading_of_the_file(path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF files")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = load_target(str(path), torch.float32)
    assert (target.name, target.decoder.config.architecture) == (NAME, "qwen2")
    ids = torch.tensor(target.tokenizer.encode_chat(PROMPT))
    ours, texts = decoder_logits(target.decoder, ids), [target.tokenizer.encode(text) for text in TEXTS]
    del target  # two of them take 14 GB
    options = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    assert [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS] == texts
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    assert (ours - reference_logits(model, ids)).abs().max() < 2e-4


def test_it_answers_and_drafting_changes_nothing(llm: LLM) -> None:
    """The preset is known by its checksum; nothing ships for it, so text that repeats is drafted."""
    assert llm.target_name == NAME and llm.is_exact
    assert llm.drafter is not None and llm.drafter.name == "ngram"
    prompts = ["What is the capital of France? Answer in one word.", "Count from 1 to 15, separated by commas."]
    params = SamplingParams(max_new_tokens=60)
    plain = llm.generate(prompts, params, pilot="ar")
    assert "Paris" in plain[0].text and "13, 14, 15" in plain[1].text
    assert [answer.finish_reason for answer in plain] == ["stop", "stop"]
    for pilot in ("auto", "fixed:6"):
        drafted = llm.generate(prompts, params, pilot=pilot)
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
        assert drafted[0].token_ids == llm.generate(prompts[0], params, pilot=pilot).token_ids, "alone"


def test_logits_are_the_same_bits_in_every_pass(llm: LLM) -> None:
    """A small probe; `blockpilot probe` runs the whole one."""
    sizes = ProbeSizes(
        text=40,
        starts=(1, 30),
        trees=(12,),
        chains=(5,),
        cuts=(7, 40),
        pieces=3,
        batches=(2,),
        short_texts=(12, 5),
        drafts=(9, 3),
    )
    assert probe(llm.engine.runner, find_difference, sizes=sizes).difference is None
