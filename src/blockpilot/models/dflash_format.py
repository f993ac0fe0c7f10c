"""DFlash checkpoints: the z-lab format that vLLM and SGLang load (read and write), and the speculators format (read).

No embedding and no head are stored: the drafter uses its target's. We add one optional tensor, `draft_token_ids`: the
rows of the target's head that the drafter looks at, because on a CPU the full head costs as much as the draft itself.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import (
    DecoderConfig,
    Layer,
    Layers,
    Size,
    TokenId,
    VocabSize,
    layer_shapes_dict,
    parse_layer_shapes,
    read_keys,
    require_values,
)
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.tensor_files import read_safetensors_folder
from blockpilot.models.weights import (
    NameTable,
    Source,
    assemble,
    decoder_layer_names,
    disassemble,
    require_depth,
    write_model_folder,
)

_BlockSize = Annotated[int, Meta(ge=1, le=1024)]
_Taps = Annotated[list[Layer], Meta(min_length=1, max_length=64)]


class _Drafter(TypedDict):
    block_size: NotRequired[_BlockSize]
    num_target_layers: NotRequired[Layers]
    dflash_config: NotRequired[dict[str, Any]]


class _Options(TypedDict):
    mask_token_id: TokenId
    target_layer_ids: _Taps
    block_size: NotRequired[_BlockSize]
    conv_kernel_size: NotRequired[Annotated[int, Meta(ge=0, le=64)]]
    conv_group_size: NotRequired[Size]
    selector_rank: NotRequired[Annotated[int, Meta(ge=0, le=4096)]]
    selector_top_k: NotRequired[Annotated[int, Meta(ge=1, le=64)]]


class _Speculators(TypedDict):
    transformer_layer_config: dict[str, Any]
    aux_hidden_state_layer_ids: Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=1, max_length=64)]
    mask_token_id: TokenId
    block_size: _BlockSize
    num_target_layers: NotRequired[Layers]  # this format does not have to say
    draft_vocab_size: NotRequired[VocabSize]


ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
HEAD_ROWS = "draft_token_ids"
_SUPPORTED: dict[str, Any] = dict.fromkeys(("use_swa", "causal", "is_causal", "final_logit_softcapping"), False)
_SUPPORTED |= {"input_embedding_scale": 1, "output_multiplier": 1}
_TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # speculators may store them; never trained


def load_dflash(folder: Path, raw: dict[str, Any], dtype: torch.dtype) -> DFlash:
    """The drafter in a folder, whose configuration is `raw`."""
    config = parse_dflash_config(raw, str(folder / "config.json"))
    tensors = read_safetensors_folder(folder)
    require_depth(config.layers.num_layers, len(tensors), str(folder))
    table = dflash_names(config)
    ignored = (HEAD_ROWS, *(_TARGET_COPIES if raw.get("speculators_model_type") else ()))
    model = assemble(
        lambda: DFlash(config), table=table, tensors=tensors, where=str(folder), dtype=dtype, ignored=ignored
    )
    if HEAD_ROWS in tensors:
        model.draft_token_ids = _check_head_rows(tensors[HEAD_ROWS], config, str(folder))
    return model


def save_dflash(model: DFlash, folder: Path) -> None:
    """Write config.json and model.safetensors in the z-lab format."""
    tensors = disassemble(model, dflash_names(model.config))
    if model.draft_token_ids is not None:
        tensors[HEAD_ROWS] = model.draft_token_ids
    write_model_folder(folder, tensors, dflash_config_dict(model.config, model.norm.weight.dtype))


def dflash_names(config: DFlashConfig) -> NameTable:
    """Which checkpoint tensors make up each parameter."""
    same = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    table: NameTable = {}
    for index in range(config.layers.num_layers):
        table |= decoder_layer_names(f"layers.{index}.", f"layers.{index}.", index, config.layers)
        if config.conv_kernel_size:
            convs = [f"layers.{index}.{name}" for name in ("attention_conv", "mlp_conv")]
            same += [f"{conv}.{part}" for conv in convs for part in ("base_kernel", "kernel_projection.weight")]
    if config.selector_rank:
        parts = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        same += [f"candidate_selector.{part}" for part in parts]
    return table | {name: [Source(name)] for name in same}


def parse_dflash_config(raw: dict[str, Any], where: str) -> DFlashConfig:
    if raw.get("speculators_model_type"):
        raw = _from_speculators(raw, where)
    given = read_keys(raw, _Drafter, where)
    if "num_target_layers" not in raw:
        raise InputError(f"{where}: key 'num_target_layers' is missing")
    all_options = given.get("dflash_config", {})
    require_values(all_options, _SUPPORTED, f"{where}: dflash_config")
    shapes, options = parse_layer_shapes(raw, where), read_keys(all_options, _Options, f"{where}: dflash_config")
    block_size = given.get("block_size", options.get("block_size"))
    if block_size is None:
        raise InputError(f"{where}: key 'block_size' is missing")
    group = options.get("conv_group_size", 16)
    if options.get("conv_kernel_size") and shapes["hidden_size"] % group:
        raise InputError(f"{where}: hidden_size {shapes['hidden_size']} is no multiple of conv_group_size {group}")
    return DFlashConfig(
        layers=DecoderConfig(architecture="qwen3", is_tied=True, **shapes),
        block_size=block_size,
        mask_token_id=options["mask_token_id"],
        tap_layers=tuple(options["target_layer_ids"]),
        num_target_layers=given.get("num_target_layers"),
        conv_kernel_size=options.get("conv_kernel_size", 0),
        conv_group_size=group,
        selector_rank=options.get("selector_rank", 0),
        selector_top_k=options.get("selector_top_k", 16),
    )


def dflash_config_dict(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    shapes = config.layers
    options: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.tap_layers)}
    if config.conv_kernel_size:
        options |= {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    if config.selector_rank:
        options |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    is_second = config.conv_kernel_size or config.selector_rank
    return {
        "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": options,
        "dtype": str(dtype).removeprefix("torch."),
        "layer_types": ["full_attention"] * shapes.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shapes.num_layers,
        "tie_word_embeddings": True,
        "bos_token_id": shapes.bos_token_id,
        "eos_token_id": shapes.eos_token_ids[0] if shapes.eos_token_ids else None,
        **layer_shapes_dict(shapes),
    }


def _from_speculators(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The speculators layout in z-lab words; its layer ids count the embedding as layer 0."""
    given = read_keys(raw, _Speculators, where)
    shapes = given["transformer_layer_config"]
    if given.get("draft_vocab_size") not in (None, shapes.get("vocab_size")):
        raise InputError(f"{where}: a reduced draft vocabulary (draft_vocab_size) is not supported in this format")
    taps = [layer - 1 for layer in given["aux_hidden_state_layer_ids"]]
    return shapes | {
        "block_size": given["block_size"],
        "num_target_layers": given.get("num_target_layers"),
        "dflash_config": {"mask_token_id": given["mask_token_id"], "target_layer_ids": taps},
    }


def _check_head_rows(rows: Tensor, config: DFlashConfig, where: str) -> Tensor:
    if rows.dtype != torch.int64 or rows.dim() != 1 or not len(rows):
        raise InputError(f"{where}: {HEAD_ROWS} must be a list of 64-bit token ids")
    if int(rows.min()) < 0 or int(rows.max()) >= config.layers.vocab_size:
        raise InputError(f"{where}: {HEAD_ROWS} names ids outside the vocabulary of {config.layers.vocab_size}")
    return rows
