"""Models by whatever name the user gives them: preset, shipped drafter, folder, GGUF file or hub id."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.progress import Report
from blockpilot.models.decoder import Decoder
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.presets import PRESETS, fetch_preset
from blockpilot.models.shipped import shipped_folder
from blockpilot.models.weights import load_decoder_folder
from blockpilot.text.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    decoder: Decoder
    tokenizer: Tokenizer
    name: str  # as the user gave it
    path: Path  # the file or folder it was read from

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's, or what the model's configuration says."""
        return self.tokenizer.eos_token_ids or self.decoder.config.eos_token_ids


def load_target(spec: str, dtype: torch.dtype, progress: Report | None = None) -> LoadedTarget:
    """Find, fetch where needed, and load a target with its tokenizer, on the CPU."""
    path = _locate_target(spec, progress)
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


def _locate_target(spec: str, progress: Report | None = None) -> Path:
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
    if _HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return _fetch_from_hub(spec)
    raise InputError(
        f"unknown target {spec!r}: no such file or folder, and no preset ({', '.join(PRESETS)}); "
        "give a preset, a Hugging Face folder, a .gguf file or a hub id such as org/name"
    )


def resolve_folder(spec: str, what: str) -> Path:
    """A shipped drafter by its name, a local folder as it is, a hub id as its downloaded folder."""
    if (shipped := shipped_folder(spec)) is not None:
        return shipped
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if _HUB_ID.fullmatch(spec) and not path.exists():
        return _fetch_from_hub(spec)
    raise InputError(
        f"unknown {what} {spec!r}: give a folder with config.json and safetensors, or a hub id such as org/name"
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
