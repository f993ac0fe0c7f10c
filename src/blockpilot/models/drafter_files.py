"""A drafter's checkpoint, by the architecture that its config names, and whether it fits a target."""

from pathlib import Path

import torch

from blockpilot.core.errors import InputError
from blockpilot.models import dflash_format, eagle3_format
from blockpilot.models.config import DecoderConfig
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.models.loading import resolve_folder
from blockpilot.models.weights import read_config


def load_drafter(spec: str, dtype: torch.dtype, *, num_target_layers: int = 0) -> DFlash | Eagle3:
    """From a shipped drafter's name, a folder or a hub id. `num_target_layers` as for `load_eagle3`."""
    folder = resolve_folder(spec, what="drafter")
    raw = read_config(folder / "config.json")
    names = raw.get("architectures") or []
    if any(name in dflash_format.ARCHITECTURES for name in names):
        return dflash_format.load_dflash(folder, raw, dtype)
    if any(name in eagle3_format.ARCHITECTURES for name in names):
        return eagle3_format.load_eagle3(folder, raw, dtype, num_target_layers=num_target_layers)
    known = ", ".join(dflash_format.ARCHITECTURES + eagle3_format.ARCHITECTURES)
    raise InputError(f"{folder / 'config.json'}: architectures {names} name no drafter; known: {known}")


def save_drafter(model: DFlash | Eagle3, folder: Path) -> None:
    """Write config.json and model.safetensors in the public format of its kind."""
    if isinstance(model, Eagle3):
        eagle3_format.save_eagle3(model, folder)
    else:
        dflash_format.save_dflash(model, folder)


def check_fit(drafter: DFlashConfig | Eagle3Config, target: DecoderConfig, name: str) -> None:
    """Refuse a drafter of another target: where shapes happen to agree it would run, and nothing be accepted.

    The error names the first field that differs, and both values.
    """
    pairs: dict[str, tuple[int | None, int]] = {  # of the drafter (None: its checkpoint does not say) and the target
        "vocab_size": (drafter.layers.vocab_size, target.vocab_size),
        "num_target_layers": (drafter.num_target_layers, target.num_layers),
    }
    if isinstance(drafter, Eagle3Config):
        pairs["target_hidden_size"] = (drafter.target_hidden_size, target.hidden_size)
    if isinstance(drafter, DFlashConfig) or not drafter.has_embedding:  # the target's embedding feeds its layers
        pairs["hidden_size"] = (drafter.layers.hidden_size, target.hidden_size)
    for field, (ours, theirs) in pairs.items():
        if ours is not None and ours != theirs:
            raise InputError(
                f"drafter {name} does not fit its target: {field} is {ours} in the drafter and {theirs} in the target"
            )
    if beyond := [layer for layer in drafter.tap_layers if not 0 <= layer < target.num_layers]:
        raise InputError(f"drafter {name} does not fit its target: tap layers {beyond} of {target.num_layers} layers")
    if isinstance(drafter, DFlashConfig) and not 0 <= drafter.mask_token_id < target.vocab_size:
        raise InputError(
            f"drafter {name}: mask_token_id {drafter.mask_token_id} lies outside the vocabulary of {target.vocab_size}"
        )
    if isinstance(drafter, DFlashConfig) and drafter.block_size < 2:
        raise InputError(f"drafter {name}: block_size {drafter.block_size} drafts nothing")
