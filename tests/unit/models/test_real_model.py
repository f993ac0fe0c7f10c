"""The real SmolLM2: what we load and export is what `transformers` sees."""

from pathlib import Path

import pytest
import torch

from blockpilot.models.export import export_target
from blockpilot.models.loading import LoadedTarget, load_target
from tests.support import decoder_logits, reference_logits

pytestmark = pytest.mark.real_model
TEXTS = [
    "Hello 12345 world, 3.14159!",
    "héllo 😀 漢字 हिन्दी e\u0301",
    "def f(x):\n    return x  # two\n\n\tend",
    "<|im_start|>user\nhi<|im_end|>\n",
    "it's we'll THEY'RE   spaces   ",
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2-135m", torch.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_target("smollm2-135m", tmp_path_factory.mktemp("export") / "smollm2")


def test_logits_match_transformers(target: LoadedTarget, exported: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    ids = torch.tensor(target.tokenizer.encode_chat("Write a function that tests whether a number is prime."))
    ours, theirs = decoder_logits(target.decoder, ids), reference_logits(model, ids)
    assert (ours - theirs).abs().max() < 1e-4
    assert model.generation_config.eos_token_id == 2
    assert target.decoder.config.eos_token_ids == (2,)


def test_token_ids_match_transformers(target: LoadedTarget, exported: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(exported)
    for text in TEXTS:
        ids = target.tokenizer.encode(text)
        assert ids == theirs(text).input_ids
        assert target.tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == target.tokenizer.apply_chat_template(messages)


def test_it_answers(target: LoadedTarget) -> None:
    ids = target.tokenizer.encode_chat("What is the capital of France?")
    for _ in range(12):
        ids.append(int(decoder_logits(target.decoder, torch.tensor(ids))[-1].argmax()))
    assert "Paris" in target.tokenizer.decode(ids)
