"""Files appear whole or not at all."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockpilot.core.errors import BlockPilotError, InputError


def ensure_folder(folder: Path) -> Path:
    """Create `folder`; one clear line when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create folder {folder}: {error.strerror}; choose another place") from error
    return folder


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the target's folder; it takes the target's name only if the block succeeds."""
    ensure_folder(target.parent)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise InputError(f"cannot write in folder {target.parent}: {error.strerror}; choose another place") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise BlockPilotError(f"cannot write {target}: {error.strerror}; the file was left as it was") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(path: Path, schema_version: int, advice: str) -> dict[str, Any] | None:
    """A JSON object that carries this `schema_version`; None where there is no file. `advice`: what else to do."""
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not readable JSON: {error}; {advice}") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != schema_version:
        raise InputError(f"{path}: schema version {version}, this program reads {schema_version}; {advice}")
    return manifest
