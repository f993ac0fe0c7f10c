from typing import Any

import pytest

from blockpilot.core.errors import InputError
from blockpilot.models.config import parse_decoder_config
from tests.support import LLAMA3_ROPE, TINY

LLAMA = TINY | {"architectures": ["LlamaForCausalLM"]}
QWEN2 = TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MOE = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*known: LlamaForCausalLM"),
        ({"hidden_size": None}, "config"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
    ],
)
def test_what_we_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_decoder_config(LLAMA | changes, "config.json")


def test_sliding_windows_of_qwen2_may_be_there_and_off() -> None:
    given = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    config = parse_decoder_config(QWEN2 | given | {"layer_types": ["full_attention"] * 2}, "config.json")
    assert config.has_qkv_bias and not config.has_qk_norm
    for change, message in (
        ({"use_sliding_window": True}, r"use_sliding_window=True is not supported \(only false\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    ):
        with pytest.raises(InputError, match=message):
            parse_decoder_config(QWEN2 | given | change, "config.json")


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_missing_keys_are_named(key: str) -> None:
    raw = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(InputError, match=f"config.json: key '{key}' is missing"):
        parse_decoder_config(raw, "config.json")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_spellings_of_the_number_of_experts(key: str) -> None:
    config = parse_decoder_config(MOE | {key: 6}, "config.json")
    assert config.moe is not None
    assert config.moe.num_experts == 6


def test_missing_number_of_experts() -> None:
    with pytest.raises(InputError, match="experts' is missing"):
        parse_decoder_config(MOE, "config.json")


def test_old_and_new_rope_settings_agree() -> None:
    old = LLAMA | {"rope_theta": 10000.0, "rope_scaling": LLAMA3_ROPE}
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE}
    assert parse_decoder_config(old, "old").rope == parse_decoder_config(new, "new").rope
