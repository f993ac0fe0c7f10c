"""Our configuration written as a Hugging Face config.json: the inverse of `parse_decoder_config`.

Readers disagree on where rotary settings stand: older ones read `rope_theta` and `rope_scaling`, newer ones
`rope_parameters`. Both are written.
"""

from typing import Any

import torch

from blockpilot.models.config import ARCHITECTURES, DecoderConfig, MoeConfig, RopeConfig


def decoder_config_dict(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in ARCHITECTURES.items()}
    dtype_name = str(dtype).removeprefix("torch.")
    raw: dict[str, Any] = {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _single_or_list(config.eos_token_ids),
        "tie_word_embeddings": config.is_tied,
    }
    raw |= layer_shapes_dict(config)
    return raw if config.moe is None else raw | _moe_dict(config.moe)


def layer_shapes_dict(config: DecoderConfig) -> dict[str, Any]:
    """The keys that targets and drafters share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context_length,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **_rope_dict(config.rope),
    }


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_context_length
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def _moe_dict(moe: MoeConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_active,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.is_normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }


def _single_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
