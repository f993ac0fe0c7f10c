"""DFlash checkpoints: the z-lab format that vLLM and SGLang load (read and write), and the speculators format (read).

No embedding and no head are stored: the drafter uses its target's. We add one optional tensor, `draft_token_ids`: the
rows of the target's head that the drafter looks at, because on a CPU the full head costs as much as the draft itself.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import DecoderConfig, layer_shapes_dict, naming_keys, parse_layer_shapes, require_values
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.tensor_files import read_safetensors_folder
from blockpilot.models.weights import (
    NameTable,
    Source,
    assemble,
    decoder_layer_names,
    disassemble,
    write_model_folder,
)

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
HEAD_ROWS = "draft_token_ids"
_SUPPORTED: dict[str, Any] = dict.fromkeys(("use_swa", "causal", "is_causal", "final_logit_softcapping"), False)
_SUPPORTED |= {"input_embedding_scale": 1, "output_multiplier": 1}
_TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # speculators may store them; never trained


def load_dflash(folder: Path, raw: dict[str, Any], dtype: torch.dtype) -> DFlash:
    """The drafter in a folder, whose configuration is `raw`."""
    config = parse_dflash_config(raw, str(folder / "config.json"))
    tensors, table = read_safetensors_folder(folder), dflash_names(config)
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
    options = raw.get("dflash_config") or {}
    require_values(options, _SUPPORTED, f"{where}: dflash_config")
    with naming_keys(where):
        return DFlashConfig(
            layers=DecoderConfig(architecture="qwen3", is_tied=True, **parse_layer_shapes(raw, where)),
            block_size=int(raw.get("block_size") or options["block_size"]),
            mask_token_id=int(options["mask_token_id"]),
            tap_layers=tuple(options["target_layer_ids"]),
            num_target_layers=None if raw["num_target_layers"] is None else int(raw["num_target_layers"]),
            conv_kernel_size=int(options.get("conv_kernel_size", 0)),
            conv_group_size=int(options.get("conv_group_size", 16)),
            selector_rank=int(options.get("selector_rank", 0)),
            selector_top_k=int(options.get("selector_top_k", 16)),
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
    if raw.get("draft_vocab_size") not in (None, raw.get("transformer_layer_config", {}).get("vocab_size")):
        raise InputError(f"{where}: a reduced draft vocabulary (draft_vocab_size) is not supported in this format")
    with naming_keys(where):
        shapes = dict(raw["transformer_layer_config"])
        taps = [layer - 1 for layer in raw["aux_hidden_state_layer_ids"]]
        options = {"mask_token_id": raw["mask_token_id"], "target_layer_ids": taps}
        return shapes | {
            "block_size": raw["block_size"],
            "num_target_layers": raw.get("num_target_layers"),  # this format does not say
            "dflash_config": options,
        }


def _check_head_rows(rows: Tensor, config: DFlashConfig, where: str) -> Tensor:
    if rows.dtype != torch.int64 or rows.dim() != 1 or not len(rows):
        raise InputError(f"{where}: {HEAD_ROWS} must be a list of 64-bit token ids")
    if int(rows.min()) < 0 or int(rows.max()) >= config.layers.vocab_size:
        raise InputError(f"{where}: {HEAD_ROWS} names ids outside the vocabulary of {config.layers.vocab_size}")
    return rows
