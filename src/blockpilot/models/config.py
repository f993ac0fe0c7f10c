"""Shapes of the models we run, read from Hugging Face configs and written as such.

One `DecoderConfig` describes Llama, Qwen3 and Qwen3-MoE by switches, and the layers of a DFlash drafter too. Reading is
strict about what we cannot run: an unsupported option is an error that names the key, never a silent approximation.
Readers of what we write disagree on where rotary settings stand: older ones read `rope_theta` and `rope_scaling`, newer
ones `rope_parameters`. Both are written.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from blockpilot.core.errors import InputError

_SHAPE_KEYS = {  # ours and theirs
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
}
_SUPPORTED = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for Llama 3, its long-context scaling."""

    theta: float
    kind: str = "default"  # default, linear, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    num_active: int
    intermediate_size: int
    is_normalized: bool
    dense_layers: tuple[int, ...] = ()  # layers that keep the plain MLP


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    architecture: str  # llama, qwen3, qwen3_moe
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: RopeConfig
    is_tied: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    moe: MoeConfig | None = None

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture != "llama"


def parse_decoder_config(raw: dict[str, Any], where: str) -> DecoderConfig:
    """A Hugging Face config.json as DecoderConfig; `where` names the file in errors."""
    names = raw.get("architectures") or []
    architecture = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if architecture is None:
        found = names or raw.get("model_type")
        raise InputError(f"{where}: architecture {found} is not supported; known: {', '.join(ARCHITECTURES)}")
    ends = raw.get("eos_token_id")
    return DecoderConfig(
        architecture=architecture,
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        bos_token_id=raw.get("bos_token_id"),
        moe=_parse_moe(raw, where) if architecture == "qwen3_moe" else None,
        **parse_layer_shapes(raw, where),
    )


def parse_layer_shapes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys that targets and drafters share."""
    require_values(raw, _SUPPORTED, where)
    with naming_keys(where):
        shapes: dict[str, Any] = {ours: int(raw[theirs]) for ours, theirs in _SHAPE_KEYS.items()}
        num_heads = shapes["num_heads"]
        shapes["num_kv_heads"] = int(raw.get("num_key_value_heads") or num_heads)
        shapes["head_dim"] = int(raw.get("head_dim") or shapes["hidden_size"] // num_heads)
        shapes["norm_eps"] = float(raw.get("rms_norm_eps", 1e-6))
        shapes["context_length"] = int(raw["max_position_embeddings"])
    if num_heads % shapes["num_kv_heads"]:
        raise InputError(
            f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {shapes['num_kv_heads']}"
        )
    return shapes | {"rope": _parse_rope(raw, where)}


@contextmanager
def naming_keys(where: str) -> Iterator[None]:
    """A key that is missing, or whose value is of no use, becomes an error that names the file."""
    try:
        yield
    except KeyError as error:
        raise InputError(f"{where}: key {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error


def require_values(raw: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Refuse options that are given, and have another value than the one we can run."""
    for key, value in wanted.items():
        given = raw.get(key)
        if given is not None and (bool(given) if value is False else given != value):
            raise InputError(f"{where}: {key}={given!r} is not supported (only {str(value).lower()})")


def _parse_rope(raw: dict[str, Any], where: str) -> RopeConfig:
    # transformers 5 writes rope_parameters; older files write rope_theta and rope_scaling
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise InputError(f"{where}: rope type {kind!r} is not supported; known: default, linear, llama3")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    given = {ours: scaling[theirs] for ours, theirs in _ROPE_KEYS.items() if kind != "default" and theirs in scaling}
    return RopeConfig(theta=theta, kind=kind, **given)


def _parse_moe(raw: dict[str, Any], where: str) -> MoeConfig:
    with naming_keys(where):
        num_layers = int(raw["num_hidden_layers"])
        step = int(raw.get("decoder_sparse_step", 1))
        plain = set(raw.get("mlp_only_layers") or [])
        return MoeConfig(
            # transformers 5 writes num_local_experts
            num_experts=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
            num_active=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["moe_intermediate_size"]),
            is_normalized=bool(raw.get("norm_topk_prob", False)),
            dense_layers=tuple(i for i in range(num_layers) if i in plain or (i + 1) % step),
        )


def decoder_config_dict(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Our configuration as a Hugging Face config.json: the inverse of `parse_decoder_config`."""
    names = {ours: theirs for theirs, ours in ARCHITECTURES.items()}
    dtype_name = str(dtype).removeprefix("torch.")
    raw: dict[str, Any] = {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": single_or_list(config.eos_token_ids),
        "tie_word_embeddings": config.is_tied,
    }
    raw |= layer_shapes_dict(config)
    if (moe := config.moe) is not None:
        raw |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.is_normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers),
        }
    return raw


def layer_shapes_dict(config: DecoderConfig) -> dict[str, Any]:
    """The keys that targets and drafters share."""
    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "linear":
        scaling |= {"factor": rope.factor}
    elif rope.kind == "llama3":
        scaling |= {theirs: getattr(rope, ours) for ours, theirs in _ROPE_KEYS.items()}
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _SHAPE_KEYS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context_length,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def single_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as configs hold them."""
    return ids[0] if len(ids) == 1 else list(ids) or None
