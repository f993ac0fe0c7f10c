"""Models by whatever name the user gives them: preset, shipped drafter, folder, GGUF file or hub id.

A drafter's checkpoint is read by the architecture that its config names, and must fit its target.
"""

import os.path
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.progress import Report
from blockpilot.models import dflash_format, eagle3_format
from blockpilot.models.config import DecoderConfig, brief, read_architectures
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.presets import PRESETS, fetch_preset, recognize
from blockpilot.models.quantized_folders import quantize_folder
from blockpilot.models.shipped import DRAFTERS, checked_folder, shipped_folder
from blockpilot.models.weights import load_decoder_folder, read_config
from blockpilot.text.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    decoder: Decoder
    tokenizer: Tokenizer
    name: str  # as the user gave it; a preset's, where the file is one
    path: Path  # the file or folder it was read from
    dtype: torch.dtype = torch.float32  # what it was loaded for; int8: its linear layers have codes and no values

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's, or what the model's configuration says."""
        return self.tokenizer.eos_token_ids or self.decoder.config.eos_token_ids


def load_target(
    spec: str, dtype: torch.dtype | None, progress: Report | None = None, *, quantize: str | None = None
) -> LoadedTarget:
    """Find, fetch where needed, and load a target with its tokenizer, on the CPU.

    Without a dtype, in 8-bit integers where it is a quantized file and this machine has kernels for it, else in
    float32. `quantize` packs the weights of a Hugging Face folder to 8 bits first.
    """
    path = _locate_target(spec, progress)
    if quantize is not None and dtype not in (None, torch.int8):
        raise InputError(f"--quantize {quantize} is for dtype int8: leave out --dtype or --quantize")
    if path.is_dir():
        dtype = dtype or (torch.int8 if quantize else torch.float32)
        weights = quantize_folder(path, quantize) if quantize else None
        decoder, tokenizer = load_decoder_folder(path, dtype, weights=weights), Tokenizer.from_folder(path)
    elif quantize is not None:
        raise InputError(
            f"--quantize packs Hugging Face folders, and {path.name} is a GGUF file: quantize it by itself"
        )
    else:
        decoder, tokenizer, dtype = load_decoder_gguf(path, dtype)
    num_ids = max(tokenizer.vocab_size, tokenizer.highest_id + 1 if path.is_dir() else 0)
    if num_ids > decoder.config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {num_ids} tokens, the model only {decoder.config.vocab_size}; "
            "they do not belong together"
        )
    name = spec if spec in PRESETS or path.is_dir() else recognize(path) or spec
    return LoadedTarget(decoder=decoder, tokenizer=tokenizer, name=name, path=path, dtype=dtype)


def _locate_target(spec: str, progress: Report | None = None) -> Path:
    """The file or folder a target is read from; presets and hub models are fetched."""
    if spec in PRESETS:
        return fetch_preset(spec, progress)
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise InputError(f"{spec} is a file but no .gguf: give a model folder, a GGUF file, a preset or a hub id")
        return path
    if _HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return _fetch_from_hub(spec)
    raise InputError(
        f"unknown target {spec!r:.200}: no such file or folder, and no preset ({', '.join(PRESETS)}); "
        "give a preset, a Hugging Face folder, a .gguf file or a hub id such as org/name"
    )


def load_drafter(spec: str, dtype: torch.dtype, *, num_target_layers: int = 0) -> DFlash | Eagle3:
    """From a shipped drafter's name, a folder or a hub id. The target's depth settles what EAGLE-3 heads leave open."""
    folder = checked_folder(spec) if spec in DRAFTERS else resolve_folder(spec)
    raw = read_config(folder / "config.json")
    names = read_architectures(raw, str(folder / "config.json"))
    if any(name in dflash_format.ARCHITECTURES for name in names):
        return dflash_format.load_dflash(folder, raw, dtype)
    if any(name in eagle3_format.ARCHITECTURES for name in names):
        return eagle3_format.load_eagle3(folder, raw, dtype, num_target_layers=num_target_layers)
    known = ", ".join(dflash_format.ARCHITECTURES + eagle3_format.ARCHITECTURES)
    raise InputError(f"{folder / 'config.json'}: architectures {brief(names)} name no drafter; known: {known}")


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


def resolve_folder(spec: str) -> Path:
    """A shipped drafter by its name, a local folder as it is, a hub id as its downloaded folder."""
    if (shipped := shipped_folder(spec)) is not None:
        return shipped
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        return path
    if _HUB_ID.fullmatch(spec) and not os.path.exists(path):
        return _fetch_from_hub(spec)
    raise InputError(
        f"unknown drafter {spec!r:.200}: give a folder with config.json and safetensors, or a hub id such as org/name"
    )


def _fetch_from_hub(repository: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except errors.GatedRepoError as error:
        message = f"{repository} is gated: accept its terms on the Hugging Face hub, then log in with `hf auth login`"
        raise InputError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{repository} is neither a local path nor a model on the Hugging Face hub (or it is private)"
        raise InputError(message) from error
    except (errors.HFValidationError, errors.RevisionNotFoundError) as error:
        raise InputError(f"{repository} is not a usable hub id: {_one_line(error)}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        message = f"cannot fetch {repository}: no local path of that name, and the Hugging Face hub is out of reach"
        raise BlockPilotError(f"{message} ({_one_line(error)}); check the network or give a local folder") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
