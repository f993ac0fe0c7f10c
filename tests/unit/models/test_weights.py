"""Loading Hugging Face folders: the same logits as `transformers`, and clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.core.errors import InputError
from blockpilot.models.weights import load_decoder_folder, save_decoder_folder
from tests.support import LLAMA3_ROPE, TINY, decoder_logits, reference_logits, save_reference

TOKEN_IDS = torch.randint(0, TINY["vocab_size"], (150,), generator=torch.Generator().manual_seed(1))
MOE = {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-scaled": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": ("qwen3_moe", MOE | {"mlp_only_layers": [0], "norm_topk_prob": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_before_and_after_saving(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind, options = CASES[case]
    expected = reference_logits(save_reference(tmp_path / "theirs", kind, **options), TOKEN_IDS)
    decoder = load_decoder_folder(tmp_path / "theirs", torch.float32)
    assert (decoder_logits(decoder, TOKEN_IDS) - expected).abs().max() < 1e-4
    save_decoder_folder(decoder, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert (reference_logits(again, TOKEN_IDS) - expected).abs().max() < 1e-4
    reloaded = load_decoder_folder(tmp_path / "ours", torch.float32)
    assert reloaded.config == decoder.config
    assert torch.equal(decoder_logits(reloaded, TOKEN_IDS), decoder_logits(decoder, TOKEN_IDS))


def test_loaded_models_share_tied_weights_and_need_no_gradients(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", tie_word_embeddings=True)
    decoder = load_decoder_folder(tmp_path, torch.bfloat16)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in decoder.parameters())
    assert decoder.rotary.inverse_frequencies.dtype == torch.float32
    assert not decoder.rotary.inverse_frequencies.is_meta


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; a double underscore in a keyword stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def test_harmless_extra_tensors_are_ignored(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", tie_word_embeddings=True)
    extra = {"lm_head__weight": torch.zeros(96, 32), "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    change_weights(tmp_path, **extra)
    load_decoder_folder(tmp_path, torch.float32)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    change_weights(tmp_path, model__norm__weight=None, model__norm__bias=torch.zeros(3))
    expected = r"missing tensors: model\.norm\.weight; unexpected tensors: model\.norm\.bias"
    with pytest.raises(InputError, match=expected):
        load_decoder_folder(tmp_path, torch.float32)


def test_many_names_are_counted(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    extra = {f"extra{index:02d}": torch.zeros(1) for index in range(11)}
    change_weights(tmp_path, **extra)
    with pytest.raises(InputError, match="extra07 and 3 more"):
        load_decoder_folder(tmp_path, torch.float32)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    name = "model__layers__1__self_attn__k_proj__weight"
    change_weights(tmp_path, **{name: torch.zeros(8, 32)})
    with pytest.raises(InputError, match=r"k_proj\.weight has shape \[8, 32\], expected \[16, 32\]"):
        load_decoder_folder(tmp_path, torch.float32)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    change_weights(tmp_path, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(InputError, match="expected floating point"):
        load_decoder_folder(tmp_path, torch.float32)


def test_quantized_and_unreadable_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no model folder"):
        load_decoder_folder(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_decoder_folder(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    with pytest.raises(InputError, match="quantized weights are not supported"):
        load_decoder_folder(tmp_path, torch.float32)
