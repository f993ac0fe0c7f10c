"""Checkpoints into modules and back.

Our layers fuse what checkpoints keep apart (q, k, v; gate and up). One table says which checkpoint tensors make up each
parameter, and serves reading, writing and every source: safetensors, GGUF (`models/gguf.py`) and drafters, which use
the same layers under another prefix. Reading is strict: a tensor that is missing, left over or misshapen is an error
that names it, because a model that loads partly still writes fluent nonsense.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, write_text
from blockpilot.core.reading import read_json
from blockpilot.models.block_codes import BlockCodes, join_parts
from blockpilot.models.config import DecoderConfig, decoder_config_dict, parse_decoder_config
from blockpilot.models.decoder import Decoder, Rotary, rope_frequencies
from blockpilot.models.memory import CODE_BYTES, Need, require_room
from blockpilot.models.tensor_files import read_safetensors_folder, write_safetensors_folder

Module = TypeVar("Module", bound=nn.Module)
_FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MAX_CONFIG_BYTES = 16 * MEGABYTE
MAX_NAMED = 8  # names listed in an error before it only counts


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor and how many rows of our parameter it fills; None: all of them."""

    name: str
    num_rows: int | None = None


NameTable = dict[str, list[Source]]  # our parameter -> checkpoint tensors, concatenated along the rows


def require_depth(num_layers: int, num_tensors: int, where: str) -> None:
    """Names of layers, and experts, that nothing is stored for are not worth listing."""
    if num_layers > num_tensors:
        raise InputError(f"{where}: a configuration of {num_layers} layers and experts, but only {num_tensors} tensors")


def _check_depth(config: DecoderConfig, num_tensors: int, where: str) -> None:
    num_sparse = 0 if config.moe is None else config.num_layers - len(config.moe.dense_layers)
    num_experts = 0 if config.moe is None else config.moe.num_experts
    require_depth(max(config.num_layers, num_sparse * num_experts), num_tensors, where)


def decoder_names(config: DecoderConfig) -> NameTable:
    """The whole table of a target."""
    table = {
        "embed_tokens.weight": [Source("model.embed_tokens.weight")],
        "norm.weight": [Source("model.norm.weight")],
    }
    for index in range(config.num_layers):
        table |= decoder_layer_names(f"layers.{index}.", f"model.layers.{index}.", index, config)
    if not config.is_tied:
        table["lm_head.weight"] = [Source("lm_head.weight")]
    return table


def decoder_layer_names(ours: str, theirs: str, index: int, config: DecoderConfig) -> NameTable:
    """One layer, by the beginnings of our names and of the checkpoint's."""
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    plain = ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj"]
    if config.has_qk_norm:
        plain += ["self_attn.q_norm", "self_attn.k_norm"]
    table = {f"{ours}{name}.weight": [Source(f"{theirs}{name}.weight")] for name in plain}
    for kind in ("weight", "bias") if config.has_qkv_bias else ("weight",):
        table[f"{ours}self_attn.qkv_proj.{kind}"] = [
            Source(f"{theirs}self_attn.q_proj.{kind}", query_rows),
            Source(f"{theirs}self_attn.k_proj.{kind}", key_rows),
            Source(f"{theirs}self_attn.v_proj.{kind}", key_rows),
        ]
    return table | _feed_forward_names(ours, theirs, index, config)


def _feed_forward_names(ours: str, theirs: str, index: int, config: DecoderConfig) -> NameTable:
    moe = config.moe
    if moe is None or index in moe.dense_layers:
        return _mlp_names(f"{ours}mlp.", f"{theirs}mlp.", config.intermediate_size)
    table = {f"{ours}mlp.gate.weight": [Source(f"{theirs}mlp.gate.weight")]}
    for expert in range(moe.num_experts):
        part = f"mlp.experts.{expert}."
        table |= _mlp_names(ours + part, theirs + part, moe.intermediate_size)
    return table


def _mlp_names(ours: str, theirs: str, num_rows: int) -> NameTable:
    gate, up = Source(f"{theirs}gate_proj.weight", num_rows), Source(f"{theirs}up_proj.weight", num_rows)
    return {
        f"{ours}gate_up_proj.weight": [gate, up],
        f"{ours}down_proj.weight": [Source(f"{theirs}down_proj.weight")],
    }


def assemble(
    make: Callable[[], Module],
    *,
    table: NameTable,
    tensors: Mapping[str, Tensor],
    where: str,
    dtype: torch.dtype,
    ignored: Iterable[str] = (),
) -> Module:
    """A module whose every parameter comes from checkpoint tensors, ready to run; gradients are off.

    In int8 linear layers have no values: whoever packs them needs their codes alone.

    `ignored` names checkpoint tensors that may be there without being read.
    """
    module = _outline(make, table=table, tensors=tensors, where=where, ignored=ignored)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    linears = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    coded = {name for name in linears if dtype == torch.int8 and is_coded(name)}  # their codes are what runs
    require_room(where, Need(weights=_num_bytes(shapes, coded, dtype)))
    kind = torch.float32 if dtype == torch.int8 else dtype
    values: dict[str, Tensor] = {}
    for name in (name for name in shapes if name not in coded):
        parts = [read_floats(source.name, tensors, where=where) for source in table[name]]
        # a single part is copied too: it may be a view of a file that somebody replaces later
        values[name] = torch.cat(parts).to(kind) if len(parts) > 1 else parts[0].to(kind, copy=True)
    module.load_state_dict(values, strict=False, assign=True)
    for child in module.modules():
        if isinstance(child, Rotary):  # frequencies are computed, never stored
            child.inverse_frequencies = rope_frequencies(child.config, child.head_dim)
    return module.requires_grad_(False).eval()


def _outline(
    make: Callable[[], Module], *, table: NameTable, tensors: Mapping[str, Tensor], where: str, ignored: Iterable[str]
) -> Module:
    """The module without values, once names and shapes of all tensors are known to be right; none of them is read."""
    _check_names(table, tensors, where=where, ignored=set(ignored))
    with torch.device("meta"):  # no memory for values that are replaced at once
        module = make()
    problems = []
    for name, parameter in module.named_parameters():
        for source in table[name]:
            found, expected = _shape_of(tensors, source.name), (source.num_rows or len(parameter), *parameter.shape[1:])
            if found != expected:
                problems.append(f"{source.name} has shape {list(found)}, expected {list(expected)}")
    if problems:
        raise InputError(f"{where}: wrong tensors: {_shorten(problems)}")
    return module


def _num_bytes(shapes: Mapping[str, torch.Size], coded: set[str], dtype: torch.dtype) -> int:
    """Of parameters, and of codes while they are loaded."""
    itemsize = torch.float32.itemsize if dtype == torch.int8 else dtype.itemsize
    return sum(int(shape.numel() * (CODE_BYTES if name in coded else itemsize)) for name, shape in shapes.items())


def _shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """What a file's header says, where the tensors lie in one."""
    find = getattr(tensors, "shape", None)
    return tuple(tensors[name].shape) if find is None else find(name)


def read_floats(name: str, tensors: Mapping[str, Tensor], *, where: str) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype not in _FLOATS:
        raise InputError(f"{where}: wrong tensors: {name} is {tensor.dtype}, expected floating point")
    return tensor


def is_coded(name: str) -> bool:
    """Whether a linear layer's weight runs in codes in int8: all do but routers, which choose between experts."""
    return not name.removesuffix(".weight").endswith(".mlp.gate")


def _check_names(table: NameTable, tensors: Mapping[str, Tensor], *, where: str, ignored: set[str]) -> None:
    wanted = {source.name for sources in table.values() for source in sources}
    left = set(tensors) - wanted - ignored
    unexpected = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
    found = {"missing": sorted(wanted - set(tensors)), "unexpected": unexpected}
    if complaints := [f"{what} tensors: {_shorten(names)}" for what, names in found.items() if names]:
        raise InputError(f"{where}: {'; '.join(complaints)}; the weights do not belong to this configuration")


def _shorten(items: list[str]) -> str:
    rest = len(items) - MAX_NAMED
    return ", ".join(items[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def disassemble(module: nn.Module, table: NameTable) -> dict[str, Tensor]:
    """Checkpoint tensors as views into the parameters of `module`: the inverse of `assemble`."""
    tensors: dict[str, Tensor] = {}
    for name, sources in table.items():
        parameter = module.get_parameter(name).detach()
        start = 0
        for source in sources:
            num_rows = source.num_rows or parameter.shape[0]
            tensors[source.name] = parameter[start : start + num_rows]
            start += num_rows
    return tensors


def build_decoder(config: DecoderConfig, tensors: Mapping[str, Tensor], *, where: str, dtype: torch.dtype) -> Decoder:
    """A decoder ready to run from any mapping of Hugging Face names to tensors."""
    _check_depth(config, len(tensors), where)
    table, ignored = decoder_names(config), _ignored(config)
    decoder = assemble(lambda: Decoder(config), table=table, tensors=tensors, where=where, dtype=dtype, ignored=ignored)
    if config.is_tied:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return decoder


def check_decoder(config: DecoderConfig, tensors: Mapping[str, Tensor], *, where: str) -> NameTable:
    """The table of a decoder that these tensors make up, by their names and shapes."""
    _check_depth(config, len(tensors), where)
    table = decoder_names(config)
    _outline(lambda: Decoder(config), table=table, tensors=tensors, where=where, ignored=_ignored(config))
    return table


def _ignored(config: DecoderConfig) -> tuple[str, ...]:
    return ("lm_head.weight",) if config.is_tied else ()


def attach_codes(decoder: Decoder, codes_of: Callable[[str], BlockCodes], *, where: str) -> None:
    """Leave the codes of checkpoint tensors on every linear layer, for whoever packs the weights."""
    table = decoder_names(decoder.config)
    if decoder.config.is_tied:
        table["lm_head.weight"] = table["embed_tokens.weight"]
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and is_coded(name):
            parts = [codes_of(source.name) for source in table[f"{name}.weight"]]
            shapes = [part.codes.shape for part in parts]
            if (sum(rows for rows, _ in shapes), shapes[0][1]) != tuple(module.weight.shape):
                expected = list(module.weight.shape)
                raise InputError(f"{where}: wrong tensors: {name} has shapes {shapes}, expected {expected} in all")
            module.block_codes = join_parts(parts)  # type: ignore[assignment]


def load_decoder_folder(folder: Path, dtype: torch.dtype, *, weights: Path | None = None) -> Decoder:
    """Read config.json and the safetensors of a Hugging Face folder. `weights`: where its tensors lie in codes."""
    config = read_decoder_config(folder)
    tensors = read_safetensors_folder(weights or folder)
    decoder = build_decoder(config, tensors, where=str(folder), dtype=dtype)
    if dtype == torch.int8:
        attach_codes(decoder, tensors.require_codes, where=str(folder))
    return decoder


def read_decoder_config(folder: Path) -> DecoderConfig:
    path = folder / "config.json"
    raw = read_config(path)
    if raw.get("quantization_config"):
        raise InputError(f"{path}: quantized weights are not supported; use the unquantized model or a GGUF file")
    return parse_decoder_config(raw, str(path))


def read_config(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] | None = read_json(path, most=MAX_CONFIG_BYTES)
    if raw is None:
        raise InputError(f"{path} is missing: {path.parent} is no model folder")
    return raw


def save_decoder_folder(decoder: Decoder, folder: Path) -> None:
    """Write config.json and safetensors under Hugging Face names. Call it before `pack_linears`."""
    config = decoder_config_dict(decoder.config, decoder.embed_tokens.weight.dtype)
    write_model_folder(folder, disassemble(decoder, decoder_names(decoder.config)), config)


def write_model_folder(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    write_safetensors_folder(folder, tensors)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
