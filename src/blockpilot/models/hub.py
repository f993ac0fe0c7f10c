"""Folders by name: drafters that ship with the package, local folders, and models on the Hugging Face hub."""

import re
from pathlib import Path

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models.shipped import shipped_folder

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


def resolve_folder(spec: str, what: str) -> Path:
    """A shipped drafter by its name, a local folder as it is, a hub id as its downloaded folder."""
    if (shipped := shipped_folder(spec)) is not None:
        return shipped
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if HUB_ID.fullmatch(spec) and not path.exists():
        return fetch_from_hub(spec)
    raise InputError(
        f"unknown {what} {spec!r}: give a folder with config.json and safetensors, or a hub id such as org/name"
    )


def fetch_from_hub(repository: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
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
