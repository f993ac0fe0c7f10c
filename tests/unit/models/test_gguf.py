from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.models.gguf import load_decoder_gguf
from tests.support import decoder_logits, reference_logits, save_reference
from tests.unit.models.gguf_files import VOCAB_SIZE, write_gguf

TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1))
SHAPES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}
QWEN = {"head_dim": 32, "tie_word_embeddings": True}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def reference(tmp_path: Path, kind: str = "llama", **options: Any) -> Any:
    return save_reference(tmp_path / "reference", kind, **(SHAPES | options))


def check_logits(path: Path, model: Any) -> None:
    decoder, _, _ = load_decoder_gguf(path, torch.float32)
    assert (decoder_logits(decoder, TOKEN_IDS) - reference_logits(model, TOKEN_IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_matches_the_dequantized_reference(tmp_path: Path, quantization: str, is_tied: bool) -> None:
    model = reference(tmp_path, tie_word_embeddings=is_tied)
    stored = write_gguf(tmp_path / "tiny.gguf", model, kind=quantization)
    model.load_state_dict(stored, strict=not is_tied)
    check_logits(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize(("kind", "options"), [("qwen3", QWEN), ("qwen3_moe", MOE)])
def test_qwen(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model = reference(tmp_path, kind, **options)
    write_gguf(tmp_path / "tiny.gguf", model)
    check_logits(tmp_path / "tiny.gguf", model)


def test_tokenizer_and_configuration_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", reference(tmp_path))
    decoder, tokenizer, _ = load_decoder_gguf(tmp_path / "tiny.gguf", torch.bfloat16)
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert decoder.config.eos_token_ids == tokenizer.eos_token_ids == (2,)
    assert tokenizer.chat_template is not None
    assert tokenizer.context_length == decoder.config.context_length == 256
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    # at base 1e6 the slowest of eight frequencies turns less than once in 8192 positions
    rope = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    model = reference(tmp_path, rope_parameters=rope)
    plain = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).float()
    assert factors.max() > 7.9
    write_gguf(tmp_path / "tiny.gguf", model, extra={"rope_freqs.weight": factors})
    decoder, _, _ = load_decoder_gguf(tmp_path / "tiny.gguf", torch.float32)
    assert (decoder.config.rope.kind, decoder.config.rope.factor) == ("llama3", 8.0)
    check_logits(tmp_path / "tiny.gguf", model)


def test_unknown_factors_are_refused_and_ones_mean_nothing(tmp_path: Path) -> None:
    model = reference(tmp_path)
    write_gguf(tmp_path / "odd.gguf", model, extra={"rope_freqs.weight": torch.linspace(1, 3, 8)})
    with pytest.raises(InputError, match="follows no known scaling"):
        load_decoder_gguf(tmp_path / "odd.gguf", torch.float32)
    write_gguf(tmp_path / "short.gguf", model, extra={"rope_freqs.weight": torch.ones(3)})
    with pytest.raises(InputError, match="has 3 values, expected 8"):
        load_decoder_gguf(tmp_path / "short.gguf", torch.float32)
    write_gguf(tmp_path / "ones.gguf", model, extra={"rope_freqs.weight": torch.ones(8)})
    check_logits(tmp_path / "ones.gguf", model)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", reference(tmp_path), extra={"blk.0.attn_q.bias": torch.ones(64)})
    with pytest.raises(InputError, match=r"unexpected tensors: blk\.0\.attn_q\.bias"):
        load_decoder_gguf(tmp_path / "tiny.gguf", torch.float32)


@pytest.mark.parametrize("share", [0.00005, 0.001, 0.02, 0.05, 0.3, 0.999])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference(tmp_path))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match="truncated"):
        load_decoder_gguf(path, torch.float32)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(InputError, match="not a GGUF file"):
        load_decoder_gguf(tmp_path / "page.gguf", torch.float32)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(InputError, match="not a GGUF file"):
        load_decoder_gguf(tmp_path / "empty.gguf", torch.float32)
    with pytest.raises(InputError, match="cannot read"):
        load_decoder_gguf(tmp_path / "absent.gguf", torch.float32)
