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


def parse_json(text: str | bytes, where: str, advice: str = "") -> Any:
    """The value that a text holds; `where` names it in the error, `advice` tells what to do."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error}){advice}") from error


def read_json(path: Path, advice: str = "") -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file. `advice` tells what to do about a damaged one."""
    if not path.is_file():
        return None
    end = f"; {advice}" if advice else ""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON: {error}{end}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object{end}")
    return value
