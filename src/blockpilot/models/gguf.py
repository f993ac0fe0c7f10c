"""GGUF files: one file with weights (mostly quantized), configuration and tokenizer.

The tensors are offered under their Hugging Face names, dequantized when asked for, so that `build_decoder` checks and
fuses them like any other checkpoint. Two conventions differ: llama.cpp interleaves the rows of q and k for the `llama`
architecture, and it stores Llama 3's rotary scaling as precomputed factors.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import INTEGER_KINDS, BlockCodes, decode_blocks
from blockpilot.models.config import (
    ContextLength,
    DecoderConfig,
    Epsilon,
    Factor,
    HeadDim,
    Heads,
    Layers,
    RopeConfig,
    Size,
    Theta,
    brief,
    parse_decoder_config,
    read_keys,
    require_values,
)
from blockpilot.models.decoder import Decoder, rope_frequencies
from blockpilot.models.gguf_file import GgufTensor, read_gguf
from blockpilot.models.packing import machine_kernels, require_packable, why_unpackable
from blockpilot.models.weights import attach_codes, build_decoder, decoder_names, is_coded, require_depth
from blockpilot.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_SHAPES = {  # keys of a Hugging Face config, and the fields that hold the same
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")  # some files hold lists
_OPTIONAL_SHAPES = {"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
_EXPERT_SHAPES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_Settings = TypedDict(  # what the fields below an architecture's name hold, as far as we read them
    "_Settings",
    {
        "embedding_length": Size,
        "feed_forward_length": Size,
        "block_count": Layers,
        "attention.head_count": Heads,
        "attention.head_count_kv": Heads,
        "attention.key_length": HeadDim,
        "attention.layer_norm_rms_epsilon": Epsilon,
        "context_length": ContextLength,
        "expert_count": int,
        "expert_used_count": int,
        "expert_feed_forward_length": Size,
        "rope.freq_base": Theta,
        "rope.scaling.type": str,
        "rope.scaling.factor": Factor,
    },
    total=False,
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROPE_FACTORS = "rope_freqs.weight"


def load_decoder_gguf(path: Path, dtype: torch.dtype | None) -> tuple[Decoder, Tokenizer, torch.dtype]:
    """Without a dtype in 8-bit integers, where all large tensors are stored so and this machine runs them."""
    file, where = read_gguf(path), str(path)
    tokenizer = Tokenizer.from_gguf(file.fields, where)
    config = _parse_config(file.fields, file.tensors, eos_token_ids=tokenizer.eos_token_ids, where=where)
    tensors = GgufTensors(file.tensors, config, where=where)
    if dtype is None:
        reason = _why_no_integers(config, tensors)
        if reason is not None and not tensors.is_float:
            logger.warning("%s runs in float32, several times slower than in int8: %s", path.name, reason)
        dtype = torch.int8 if reason is None else torch.float32
    elif dtype == torch.int8:
        require_packable(config, where)
    decoder = build_decoder(config, tensors, where=where, dtype=dtype)
    if dtype == torch.int8:
        attach_codes(decoder, tensors.require_codes, where=where)
    return decoder, tokenizer, dtype


def _why_no_integers(config: DecoderConfig, tensors: "GgufTensors") -> str | None:
    """Why a file cannot run in 8-bit integers on this machine. None: it can."""
    if (reason := why_unpackable(config)) is not None:
        return reason
    if tensors.other is not None:
        return _describe_kind(tensors.other)
    return None if machine_kernels() is not None else "there are no compiled CPU kernels here"


def _describe_kind(tensor: GgufTensor) -> str:
    known = ", ".join(INTEGER_KINDS)
    return f"tensor {tensor.name} has type {tensor.kind}, which does not run in int8 (known: {known})"


class GgufTensors(Mapping[str, Tensor]):
    """Hugging Face name -> float32 tensor, dequantized when asked for."""

    def __init__(self, stored: Mapping[str, GgufTensor], config: DecoderConfig, *, where: str) -> None:
        self.where, self._config = where, config
        self._sources: dict[str, tuple[GgufTensor, int | None]] = {}  # name -> tensor of the file, expert in it
        self._interleaved_heads: dict[str, int] = {}  # projection -> heads, where rows are in llama.cpp's order
        if config.architecture == "llama":
            self._interleaved_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        require_depth(config.num_layers, len(stored), where)
        names = _hugging_face_names(config)
        num_experts = config.moe.num_experts if config.moe else 0
        for tensor in stored.values():
            name = names.get(tensor.name, tensor.name)  # an unknown name stays, to be reported as unexpected
            if ".experts." in name:
                if len(tensor.shape) != 3 or tensor.shape[-1] != num_experts:
                    shape = list(tensor.shape)
                    raise InputError(f"{where}: tensor {tensor.name} has shape {shape}, not of {num_experts} experts")
                experts = range(num_experts)
                self._sources |= {name.replace(".experts.", f".experts.{i}."): (tensor, i) for i in experts}
            elif name != _ROPE_FACTORS:
                self._sources[name] = (tensor, None)

    def __getitem__(self, name: str) -> Tensor:
        tensor, expert = self._sources[name]
        weight = _dequantize(tensor, expert, where=self.where)
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        return _restore_row_order(weight, num_heads) if num_heads else weight

    def shape(self, name: str) -> tuple[int, ...]:
        """Without looking at the tensor."""
        tensor, expert = self._sources[name]
        return tensor.shape[::-1] if expert is None else tensor.shape[-2::-1]

    def codes(self, name: str) -> BlockCodes | None:
        """The tensor's codes in our row order; None where it is not stored as integers."""
        tensor, expert = self._sources[name]
        data = tensor.data if expert is None else tensor.data[expert]
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        if num_heads:
            data = data[_restore_row_order(torch.arange(len(data))[:, None], num_heads)[:, 0].numpy()]
        return decode_blocks(data, tensor.kind)

    @cached_property
    def other(self) -> GgufTensor | None:
        """The first matrix that is not stored in a form that runs in 8-bit integers; routers stay float32."""
        coded = {source.name for name, row in decoder_names(self._config).items() if is_coded(name) for source in row}
        if not self._config.is_tied:
            coded.discard("model.embed_tokens.weight")
        matrices = (tensor for name, (tensor, _) in self._sources.items() if name in coded and len(tensor.shape) > 1)
        return next((tensor for tensor in matrices if tensor.kind not in INTEGER_KINDS), None)

    @property
    def is_float(self) -> bool:
        return self.other is not None and self.other.kind in ("F32", "F16", "BF16")

    def require_codes(self, name: str) -> BlockCodes:
        codes = self.codes(name)
        if codes is None:
            raise InputError(f"{self.where}: {_describe_kind(self._sources[name][0])}; use --dtype float32")
        return codes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _hugging_face_names(config: DecoderConfig) -> dict[str, str]:
    """By the file's names. All experts of a layer lie in one tensor, so that their names have no number here."""
    import gguf

    architecture = gguf.MODEL_ARCH[config.architecture.replace("_", "").upper()]
    names: Any = gguf.get_tensor_name_map(architecture, config.num_layers)
    wanted = {_EXPERT.sub(".experts.", source.name) for row in decoder_names(config).values() for source in row}
    return {names.get_name(name, (".weight", ".bias")): name for name in wanted}


def _dequantize(tensor: GgufTensor, expert: int | None, *, where: str) -> Tensor:
    import gguf

    data = tensor.data if expert is None else tensor.data[expert]
    try:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])
    except NotImplementedError as error:
        raise InputError(f"{where}: tensor {tensor.name} has type {tensor.kind}, which is not supported") from error
    values = np.asarray(values, dtype=np.float32)
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # torch wants no read-only memory


def _restore_row_order(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp pairs neighbouring rows for its rotary embedding; ours pairs row i with row i + D/2 of the head."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _parse_config(
    fields: Mapping[str, Any], stored: Mapping[str, GgufTensor], *, eos_token_ids: tuple[int, ...], where: str
) -> DecoderConfig:
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{where}: architecture {brief(name)} is not supported; known: {', '.join(ARCHITECTURES)}")
    settings = _read_settings(fields, name, where)
    is_moe = name == "qwen3moe"
    try:
        raw = {key: settings[field] for key, field in (_SHAPES | (_EXPERT_SHAPES if is_moe else {})).items()}
    except KeyError as error:
        raise InputError(f"{where}: field {name}.{error.args[0]} is missing") from error
    raw |= {key: settings[field] for key, field in _OPTIONAL_SHAPES.items() if field in settings}
    raw |= {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "norm_topk_prob": True,  # the file does not say; every Qwen3-MoE model is normalised
        "tie_word_embeddings": "output.weight" not in stored,
        "eos_token_id": list(eos_token_ids),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
    }
    config = parse_decoder_config(raw, where)
    wanted = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config.head_dim)
    require_values(settings, wanted | {"attention.sliding_window": False}, f"{where}: {name}")
    if not is_moe:
        require_values(settings, {"expert_count": False}, f"{where}: {name}")
    factors = _read_factors(stored[_ROPE_FACTORS], config.head_dim, where) if _ROPE_FACTORS in stored else None
    return replace(config, rope=_parse_rope(settings, head_dim=config.head_dim, factors=factors, where=where))


def _read_settings(fields: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """The fields below an architecture's name; those that we know have the right kind."""
    settings = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    for key, value in settings.items():
        if isinstance(value, list) and key in _PER_LAYER:  # one value for each layer
            if not value or any(other != value[0] for other in value):
                raise InputError(f"{where}: {name}.{key} differs between layers, which is not supported")
            settings[key] = value[0]
    return settings | read_keys(settings, _Settings, f"{where}: {name}")


def _parse_rope(settings: Mapping[str, Any], *, head_dim: int, factors: Tensor | None, where: str) -> RopeConfig:
    """`settings` are the fields below the architecture's name, `factors` the tensor rope_freqs.weight."""
    theta = settings.get("rope.freq_base", 10000.0)
    kind = settings.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise InputError(f"{where}: rope scaling {brief(kind)} is not supported; known: none, linear, llama3")
    if factors is not None:
        if kind == "linear":
            raise InputError(f"{where}: linear rope scaling together with rope_freqs.weight is not supported")
        return _recover_llama3(theta, head_dim=head_dim, factors=factors, where=where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=settings.get("rope.scaling.factor", 1.0))
    return RopeConfig(theta=theta)


def _read_factors(tensor: GgufTensor, head_dim: int, where: str) -> Tensor:
    if tensor.shape != (head_dim // 2,):
        shape = " x ".join(map(str, tensor.shape))
        raise InputError(f"{where}: rope_freqs.weight has {shape} values, expected {head_dim // 2}")
    return _dequantize(tensor, None, where=where)


def _recover_llama3(theta: float, *, head_dim: int, factors: Tensor, where: str) -> RopeConfig:
    """The numbers behind Llama 3's scaling, which a config.json must hold.

    llama.cpp evaluates the formula once and stores one divisor per frequency. The largest divisor is the factor, the
    other three numbers are the same in every Llama 3 release. If the formula then gives the stored divisors, it is
    right; otherwise the file uses a scaling we do not know, and is refused.
    """
    plain = RopeConfig(theta=theta)
    if bool((factors == 1).all()):
        return plain
    scaled = RopeConfig(theta=theta, kind="llama3", factor=round(float(factors.max()), 4))
    expected = rope_frequencies(plain, head_dim) / rope_frequencies(scaled, head_dim)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise InputError(f"{where}: rope_freqs.weight follows no known scaling; use the Hugging Face folder instead")
    return scaled
