"""Shapes of the models we run, read from Hugging Face configs and written as such.

One `DecoderConfig` describes Llama, Qwen2, Qwen3 and Qwen3-MoE by switches, and the layers of a DFlash drafter too.
Reading is strict about what we cannot run: an unsupported option is an error that names the key, never a silent
approximation. Readers of what we write disagree on where rotary settings stand: older ones read `rope_theta` and
`rope_scaling`, newer ones `rope_parameters`. Both are written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from msgspec import Meta

from blockpilot.core.errors import InputError
from blockpilot.core.reading import convert

# Bounds of what a file may say: far above every model there is, and small enough that nothing overflows.
Layers = Annotated[int, Meta(ge=1, le=1024)]
Size = Annotated[int, Meta(ge=1, le=2**18)]
Heads = Annotated[int, Meta(ge=1, le=1024)]
HeadDim = Annotated[int, Meta(ge=2, le=2048, multiple_of=2)]  # the rotary embedding turns pairs
VocabSize = Annotated[int, Meta(ge=1, le=2**22)]
TokenId = Annotated[int, Meta(ge=0, lt=2**22)]
ContextLength = Annotated[int, Meta(ge=1, le=2**30)]
Experts = Annotated[int, Meta(ge=1, le=4096)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
Theta = Annotated[float, Meta(ge=1, le=1e15)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]
Layer = Annotated[int, Meta(ge=0, lt=1024)]
MAX_EXPERTS = 2**16  # of all layers together
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
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class _Shapes(TypedDict):
    """The keys that targets and drafters share."""

    vocab_size: VocabSize
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: ContextLength
    num_key_value_heads: NotRequired[Heads]
    head_dim: NotRequired[HeadDim]
    rms_norm_eps: NotRequired[Epsilon]
    rope_theta: NotRequired[Theta]
    rope_parameters: NotRequired[dict[str, Any]]
    rope_scaling: NotRequired[dict[str, Any]]
    layer_types: NotRequired[list[str]]


class _Rope(TypedDict, total=False):
    rope_theta: Theta
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: ContextLength


class _Target(TypedDict, total=False):
    tie_word_embeddings: bool
    eos_token_id: TokenId | list[TokenId]
    bos_token_id: TokenId


class _Moe(TypedDict):
    num_experts: Experts
    num_experts_per_tok: Experts
    moe_intermediate_size: Size
    norm_topk_prob: NotRequired[bool]
    decoder_sparse_step: NotRequired[Layers]
    mlp_only_layers: NotRequired[list[Layer]]


class _Architectures(TypedDict, total=False):
    architectures: list[str]


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
    architecture: str  # llama, qwen2, qwen3, qwen3_moe
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
        return self.architecture in ("qwen3", "qwen3_moe")

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture == "qwen2"


def parse_decoder_config(raw: dict[str, Any], where: str) -> DecoderConfig:
    """A Hugging Face config.json as DecoderConfig; `where` names the file in errors."""
    names = read_architectures(raw, where)
    architecture = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if architecture is None:
        found = brief(names or raw.get("model_type"))
        raise InputError(f"{where}: architecture {found} is not supported; known: {', '.join(ARCHITECTURES)}")
    shapes, given = parse_layer_shapes(raw, where), read_keys(raw, _Target, where)
    ends = given.get("eos_token_id", ())
    return DecoderConfig(
        architecture=architecture,
        is_tied=given.get("tie_word_embeddings", False),
        eos_token_ids=(ends,) if isinstance(ends, int) else tuple(ends),
        bos_token_id=given.get("bos_token_id"),
        moe=_parse_moe(raw, where, num_layers=shapes["num_layers"]) if architecture == "qwen3_moe" else None,
        **shapes,
    )


def read_architectures(raw: Mapping[str, Any], where: str) -> list[str]:
    names: list[str] = read_keys(raw, _Architectures, where).get("architectures", [])
    return names


def parse_layer_shapes(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys that targets and drafters share."""
    require_values(raw, _SUPPORTED, where)
    given = read_keys(raw, _Shapes, where)
    shapes: dict[str, Any] = {ours: given[theirs] for ours, theirs in _SHAPE_KEYS.items()}
    num_heads, num_kv_heads = shapes["num_heads"], given.get("num_key_value_heads", shapes["num_heads"])
    if num_heads % num_kv_heads:
        raise InputError(
            f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if other := [kind for kind in given.get("layer_types", ()) if kind != "full_attention"]:
        raise InputError(
            f"{where}: layer_types holds {brief(other[0])}, which is not supported (only 'full_attention')"
        )
    head_dim = given.get("head_dim", shapes["hidden_size"] // num_heads)
    return shapes | {
        "num_kv_heads": num_kv_heads,
        "head_dim": convert(head_dim, HeadDim, f"{where}: hidden_size {shapes['hidden_size']} by {num_heads} heads"),
        "norm_eps": given.get("rms_norm_eps", 1e-6),
        "context_length": given["max_position_embeddings"],
        "rope": _parse_rope(given, where),
    }


def read_keys(raw: Mapping[str, Any], kind: Any, where: str) -> Any:
    """Those keys that a TypedDict names, with values of its kinds; null is as good as absent."""
    given = {key: raw[key] for key in kind.__annotations__ if raw.get(key) is not None}
    for key in sorted(kind.__required_keys__ - given.keys()):
        raise InputError(f"{where}: key {key!r} is missing")
    return convert(given, kind, where)


def brief(value: object, most: int = 80) -> str:
    """A value of a file, short enough for one line."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def require_values(raw: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Refuse options that are given, and have another value than the one we can run."""
    for key, value in wanted.items():
        given = raw.get(key)
        if given is not None and (bool(given) if value is False else given != value):
            raise InputError(f"{where}: {key}={brief(given)} is not supported (only {str(value).lower()})")


def _parse_rope(given: Mapping[str, Any], where: str) -> RopeConfig:
    # transformers 5 writes rope_parameters; older files write rope_theta and rope_scaling
    name = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    scaling = given.get(name) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3") or any(isinstance(value, dict) for value in scaling.values()):
        raise InputError(f"{where}: rope type {brief(kind)} is not supported; known: default, linear, llama3")
    found = read_keys(scaling, _Rope, f"{where}: {name}")
    theta = found.get("rope_theta", given.get("rope_theta", 10000.0))
    factors = {ours: found[theirs] for ours, theirs in _ROPE_KEYS.items() if kind != "default" and theirs in found}
    rope = RopeConfig(theta=theta, kind=kind, **factors)
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise InputError(f"{where}: {name}: low_freq_factor must be smaller than high_freq_factor")
    return rope


def _parse_moe(raw: Mapping[str, Any], where: str, *, num_layers: int) -> MoeConfig:
    # transformers 5 writes num_local_experts
    given = read_keys({"num_experts": raw.get("num_local_experts"), **raw}, _Moe, where)
    num_experts, num_active = given["num_experts"], given["num_experts_per_tok"]
    if num_active > num_experts:
        raise InputError(f"{where}: num_experts_per_tok {num_active} is more than num_experts {num_experts}")
    if num_layers * num_experts > MAX_EXPERTS:
        raise InputError(f"{where}: {num_layers} layers of {num_experts} experts are more than {MAX_EXPERTS} experts")
    step, plain = given.get("decoder_sparse_step", 1), set(given.get("mlp_only_layers", ()))
    return MoeConfig(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=given["moe_intermediate_size"],
        is_normalized=given.get("norm_topk_prob", False),
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
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        **({} if config.has_qkv_bias else {"attention_bias": False}),  # qwen2 has no such key
    }


def single_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as configs hold them."""
    return ids[0] if len(ids) == 1 else list(ids) or None
