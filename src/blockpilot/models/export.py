"""A target written as a Hugging Face folder, for `transformers`, vLLM, SGLang and training tools.

The folder appears whole or not at all: it is written beside its place and renamed at the end, when an earlier export is
removed. A small marker file tells our exports apart from folders that somebody else filled, which are never touched.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from blockpilot.core.checksums import is_intact, write_list
from blockpilot.core.config import cache_dir
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import (
    ensure_folder,
    reason_of,
    remove_leftovers,
    sync_folder,
    unfinished_folder,
    write_text,
)
from blockpilot.core.progress import Report
from blockpilot.models.config import single_or_list
from blockpilot.models.dflash import DFlash
from blockpilot.models.loading import LoadedTarget, load_drafter, load_target, save_drafter
from blockpilot.models.shipped import DRAFTERS
from blockpilot.models.weights import save_decoder_folder

logger = logging.getLogger(__name__)
MARKER = "blockpilot_export.json"


def export_target(spec: str, out: Path, progress: Report | None = None) -> Path:
    """Write any target that we can load as a folder of fp32 weights, configuration and tokenizer."""
    check_destination(out)
    target = load_target(spec, torch.float32, progress)
    return _write_whole(out, target.name, lambda folder: _write_files(target, folder))


def export_drafter(name: str, out: Path) -> Path:
    """Write a shipped drafter in the public format that other engines load: in bfloat16, without our reduced head."""
    check_destination(out)
    model = load_drafter(name, torch.bfloat16)
    if isinstance(model, DFlash):
        model.draft_token_ids = None
    return _write_whole(out, name, lambda folder: save_drafter(model, folder))


def public_drafter(spec: str) -> str:
    """What another engine loads for `spec`: a shipped drafter as exported, once, into the cache; others as they are."""
    if spec not in DRAFTERS:
        return spec
    folder = cache_dir() / "exported" / DRAFTERS[spec].sha256[:12] / spec
    if not is_intact(folder):
        if folder.exists():
            logger.warning("%s is incomplete or damaged, and made anew", folder)
            shutil.rmtree(folder, ignore_errors=True)
        write_list(export_drafter(spec, folder))  # last: without it nothing counts
    return str(folder)


def _write_whole(out: Path, source: str, write: Callable[[Path], None]) -> Path:
    """Fill a folder beside its place, mark what it was exported from, then give it its name."""
    parent = ensure_folder(out.absolute().parent)
    remove_leftovers(parent, out.name, days=1)
    temporary = unfinished_folder(parent / out.name)
    try:
        write(temporary)
        write_text(temporary / MARKER, json.dumps({"source": source}, indent=2) + "\n")
        temporary.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
        sync_folder(parent)
    except OSError as error:
        raise BlockPilotError(f"cannot write {out}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def check_destination(out: Path) -> None:
    """Refuse to overwrite what is not an earlier export."""
    if not os.path.lexists(out):
        return
    if not os.path.isdir(out):
        raise InputError(f"{out} exists and is not a folder; choose another place")
    if any(out.iterdir()) and not (out / MARKER).is_file():
        raise InputError(f"{out} is not empty and not an earlier export; choose another folder")


def _write_files(target: LoadedTarget, folder: Path) -> None:
    save_decoder_folder(target.decoder, folder)
    target.tokenizer.save(folder)
    tokenizer = target.tokenizer
    padding = tokenizer.special_tokens.get("pad_token")
    values = {
        "bos_token_id": target.decoder.config.bos_token_id,
        "eos_token_id": single_or_list(tokenizer.eos_token_ids),
        "pad_token_id": tokenizer.backend.token_to_id(padding) if padding else None,
    }
    generation = {"do_sample": False} | {key: value for key, value in values.items() if value is not None}
    write_text(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
