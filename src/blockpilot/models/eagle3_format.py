"""EAGLE-3 checkpoints: the public format that vLLM and SGLang load (read and write), and the speculators format (read).

The formats name the layer `midlayer` or `layers.0`, and keep the reduced vocabulary as offsets: `d2t` (target id =
draft id + d2t) and the mask `t2d`. Tap layers are named in two ways. The defaults (2, N/2, N-3) and the top-level key
`eagle_aux_hidden_state_layer_ids` name the layer whose INPUT is read, as vLLM does; inside `eagle_config` the same key
names the layer whose OUTPUT is read, as SGLang does. Ours are outputs; both are written, so that every reader agrees.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import (
    DecoderConfig,
    Layers,
    Size,
    VocabSize,
    layer_shapes_dict,
    parse_layer_shapes,
    read_keys,
    require_values,
)
from blockpilot.models.eagle3 import NUM_TAPS, Eagle3, Eagle3Config
from blockpilot.models.packing import quantize_linears
from blockpilot.models.tensor_files import read_safetensors_folder
from blockpilot.models.weights import (
    NameTable,
    Source,
    assemble,
    decoder_layer_names,
    disassemble,
    write_model_folder,
)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
VOCABULARY_TENSORS = ("d2t", "t2d")
_Taps = Annotated[list[Annotated[int, Meta(ge=-1, le=1024)]], Meta(max_length=64)]


class _Drafter(TypedDict, total=False):
    eagle_config: dict[str, Any]
    num_target_layers: Layers
    draft_vocab_size: VocabSize
    target_hidden_size: Size
    norm_before_residual: bool
    eagle_aux_hidden_state_layer_ids: _Taps  # TAP_KEY
    aux_hidden_state_layer_ids: _Taps


class _Options(TypedDict, total=False):
    eagle_aux_hidden_state_layer_ids: _Taps


class _Speculators(TypedDict):
    transformer_layer_config: dict[str, Any]


_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


def load_eagle3(folder: Path, raw: dict[str, Any], dtype: torch.dtype, *, num_target_layers: int) -> Eagle3:
    """The drafter in a folder; the target's depth settles what its configuration `raw` leaves to defaults."""
    config = parse_eagle3_config(raw, str(folder / "config.json"), num_target_layers=num_target_layers)
    tensors = read_safetensors_folder(folder)
    config = replace(config, has_embedding=EMBEDDING in tensors)
    layer_name = "layers.0" if any(name.startswith("layers.0.") for name in tensors) else "midlayer"
    model = assemble(
        lambda: Eagle3(config),
        table=eagle3_names(config, layer_name),
        tensors=tensors,
        where=str(folder),
        dtype=dtype,
        ignored=VOCABULARY_TENSORS,
    )
    if tensors.is_packed and dtype == torch.float32:
        quantize_linears(model)  # the stored codes again, for whoever packs the weights
    model.draft_token_ids = _read_vocabulary(tensors, config, str(folder))
    return model


def save_eagle3(model: Eagle3, folder: Path) -> None:
    """Write config.json and model.safetensors in the public format."""
    ids = model.draft_token_ids.cpu()
    mask = torch.isin(torch.arange(model.config.layers.vocab_size), ids)
    tensors = disassemble(model, eagle3_names(model.config, "midlayer"))
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    write_model_folder(folder, tensors, eagle3_config_dict(model.config, model.norm.weight.dtype))


def eagle3_names(config: Eagle3Config, layer_name: str) -> NameTable:
    """Which checkpoint tensors make up each parameter; `layer_name` is what the checkpoint calls its layer."""
    table = decoder_layer_names("midlayer.", f"{layer_name}.", 0, config.layers)
    table["midlayer.hidden_norm.weight"] = [Source(f"{layer_name}.hidden_norm.weight")]
    same = ["fc.weight", "norm.weight", "lm_head.weight"] + ([EMBEDDING] if config.has_embedding else [])
    return table | {name: [Source(name)] for name in same}


def parse_eagle3_config(raw: dict[str, Any], where: str, *, num_target_layers: int) -> Eagle3Config:
    require_values(raw, dict.fromkeys(_UNSUPPORTED, False), where)
    given = read_keys(raw, _Drafter, where)
    require_values(given.get("eagle_config", {}), {"use_aux_hidden_state": True}, f"{where}: eagle_config")
    keys = raw  # the shapes of the layer stand at the top, or in speculators' own section
    if raw.get("speculators_model_type"):
        keys = read_keys(raw, _Speculators, where)["transformer_layer_config"]
    require_values(keys, {"model_type": "llama", "num_hidden_layers": 1}, where)
    shapes = parse_layer_shapes(keys, where)
    depth = given.get("num_target_layers", num_target_layers)
    config = Eagle3Config(
        layers=DecoderConfig(architecture="llama", is_tied=False, **shapes),
        draft_vocab_size=given.get("draft_vocab_size", shapes["vocab_size"]),
        tap_layers=_tap_layers(given, where, depth),
        num_target_layers=depth,
        target_hidden_size=given.get("target_hidden_size", shapes["hidden_size"]),
        is_residual_normed=given.get("norm_before_residual", False),
    )
    if not 1 <= config.draft_vocab_size <= shapes["vocab_size"]:
        raise InputError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} does not lie in 1..vocab_size {shapes['vocab_size']}"
        )
    return config


def eagle3_config_dict(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    shapes = config.layers
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        TAP_KEY: [layer + 1 for layer in config.tap_layers],
        "eagle_config": {TAP_KEY: list(config.tap_layers), "use_aux_hidden_state": True},
        "norm_before_residual": config.is_residual_normed,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "tie_word_embeddings": False,
        "bos_token_id": shapes.bos_token_id,
        "eos_token_id": shapes.eos_token_ids[0] if shapes.eos_token_ids else None,
        **layer_shapes_dict(shapes),
    }


def _tap_layers(given: Mapping[str, Any], where: str, depth: int) -> tuple[int, ...]:
    """Output ids of the tap layers; the two keys that may name them must agree."""
    by_input = given.get(TAP_KEY) or given.get("aux_hidden_state_layer_ids")  # newer speculators drop the prefix
    by_output = read_keys(given.get("eagle_config", {}), _Options, f"{where}: eagle_config").get(TAP_KEY)
    if by_input and by_output and [layer - 1 for layer in by_input] != by_output:
        raise InputError(
            f"{where}: {TAP_KEY} {by_input} (inputs) and eagle_config.{TAP_KEY} {by_output} (outputs) name other layers"
        )
    layers = by_output or [layer - 1 for layer in by_input or (2, depth // 2, depth - 3)]
    if len(layers) != NUM_TAPS:
        raise InputError(f"{where}: {TAP_KEY} must name {NUM_TAPS} layers, got {len(layers)}")
    return tuple(layers)


def _read_vocabulary(tensors: Mapping[str, Tensor], config: Eagle3Config, where: str) -> Tensor:
    """The target's id of every row of the head; without `d2t` the head must cover the whole vocabulary."""
    rows, vocab_size = torch.arange(config.draft_vocab_size), config.layers.vocab_size
    if "d2t" not in tensors:
        if config.draft_vocab_size != vocab_size:
            raise InputError(f"{where}: missing tensors: d2t; draft_vocab_size is smaller than vocab_size")
        return rows
    offsets = tensors["d2t"]
    if offsets.is_floating_point() or offsets.shape != rows.shape:
        raise InputError(f"{where}: d2t must be {len(rows)} integers, got {offsets.dtype} {list(offsets.shape)}")
    ids = rows + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise InputError(f"{where}: d2t names ids twice or outside the vocabulary of {vocab_size}")
    if "t2d" in tensors:
        mask = torch.isin(torch.arange(vocab_size), ids)
        if tensors["t2d"].shape != mask.shape or not torch.equal(tensors["t2d"].to(torch.bool), mask):
            raise InputError(f"{where}: t2d and d2t name different tokens")
    return ids
