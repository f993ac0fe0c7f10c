"""A disk that fails on purpose: it takes the place of the last functions of `core/files.py` and of those of locks.

The n-th operation fails: with an error, once or (a full disk) from then on; or the process is killed there, and nothing
that it does afterwards reaches the disk; or the power is cut, which also takes what was not yet safe. A write that
fails leaves half of its bytes.

Safe is the content of a file since its last sync, and the name of a file or folder since the last sync of the folder
that holds it. A power cut undoes an end of the list of unsafe changes of names, as file systems with a journal do, of
whatever length; of unsafe content it leaves half, with nothing or zeros behind it.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from blockpilot.core import files, locks

KINDS = ("error", "full", "kill", "power")
GROUPS = {
    "read": ("_look", "_read"),
    "write": ("_create", "_write", "_append", "_make_folder", "_open", "_write_note"),
    "sync": ("_sync",),
    "name": ("_rename", "_remove", "_remove_folder"),
}
_LOCKS = ("_open", "_write_note")
_FILLING = ("_write", "_append")


class Killed(BaseException):
    """SIGKILL: no handler of the program's may take it."""


@dataclass(frozen=True)
class Fault:
    kind: str
    place: int  # of the operation that fails, from 1; a power cut beyond the last one comes after the run
    seed: int = 0  # of what a power cut takes


@dataclass(frozen=True)
class _Change:
    """Of a name, not yet safe."""

    path: Path
    undo: Callable[[], None]


@dataclass
class FaultyDisk:
    fault: Fault | None = None  # None: all goes well, and operations are counted
    operations: list[tuple[str, Path]] = field(default_factory=list)
    has_struck: bool = False
    _is_dead: bool = False
    _changes: list[_Change] = field(default_factory=list)
    _safe_bytes: dict[Path, int] = field(default_factory=dict)  # of files whose content is not safe

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for name in (name for group in GROUPS.values() for name in group):
            module = locks if name in _LOCKS else files
            self._patch.setattr(module, name, self._guard(name, getattr(module, name)))
        return self

    def follow(self, earlier: "FaultyDisk") -> Self:
        """What a run before this one has left unsafe is still so."""
        self._changes, self._safe_bytes = [*earlier._changes], {**earlier._safe_bytes}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._patch.undo()

    @property
    def unsafe(self) -> int:
        """Changes of real names and of contents that a power cut might take now."""
        return sum(not change.path.name.startswith(".") for change in self._changes) + len(self._safe_bytes)

    def cut_power(self) -> None:
        """Take what was not safe."""
        chance = random.Random(self.fault.seed if self.fault else 0)
        for path, size in self._safe_bytes.items():
            data = path.read_bytes()
            kept = data[: size + (len(data) - size) // 2]
            path.write_bytes(kept + bytes(len(data) - len(kept)) * chance.randrange(2))
        for change in self._changes[chance.randint(0, len(self._changes)) :][::-1]:
            change.undo()
        self._changes, self._safe_bytes = [], {}

    def _guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if self._is_dead:
                raise Killed
            path = next((one for one in given[::-1] if isinstance(one, Path)), Path(locks.LOCK))  # of a rename the new
            self.operations.append((name, path))
            if self._is_struck(name, path):
                self._fail(name, path, given, real)
            return self._note(name, path, given, real)

        return call

    def _is_struck(self, name: str, path: Path) -> bool:
        place, fault = len(self.operations), self.fault
        if fault is None or fault.kind != "full":
            return fault is not None and place == fault.place
        is_filling = name in GROUPS["write"] or (name == "_sync" and path.is_file())  # room may be found that late
        return place >= fault.place and is_filling

    def _fail(self, name: str, path: Path, given: tuple[Any, ...], real: Callable[..., Any]) -> None:
        assert self.fault is not None
        self.has_struck = True
        if name in _FILLING:
            self._note(name, path, (given[0], given[1][: len(given[1]) // 2]), real)
        if self.fault.kind in ("kill", "power"):
            self._is_dead = True
            raise Killed
        is_full = self.fault.kind == "full" or name in GROUPS["write"]
        if is_full and name == "_sync":
            safe = self._safe_bytes.get(path, 0)
            os.truncate(path, safe + (path.stat().st_size - safe) // 2)
        code = errno.ENOSPC if is_full else errno.EIO
        raise OSError(code, os.strerror(code), str(path))

    def _note(self, name: str, path: Path, given: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        """Do it, and remember how to undo it."""
        before = getattr(self, f"_before{name}", lambda *_: None)(*given)
        result = real(*given)
        getattr(self, f"_after{name}", lambda *_: None)(before, result, *given)
        return result

    def _after_create(self, before: None, made: Path, target: Path) -> None:
        self._made(made)
        self._safe_bytes[made] = 0

    def _after_write(self, before: None, result: None, path: Path, data: bytes) -> None:
        self._safe_bytes[path] = 0

    def _before_append(self, path: Path, data: bytes) -> int | None:
        return path.stat().st_size if path.exists() else None

    def _after_append(self, before: int | None, result: None, path: Path, data: bytes) -> None:
        if before is None:
            self._made(path)
        self._safe_bytes.setdefault(path, before or 0)

    def _before_open(self, path: Path) -> bool:
        return path.exists()

    def _after_open(self, before: bool, handle: int, path: Path) -> None:
        if not before:
            self._made(path)

    def _after_make_folder(self, before: None, result: None, path: Path) -> None:
        self._changes.append(_Change(path, lambda: shutil.rmtree(path)))

    def _after_sync(self, before: None, result: None, path: Path) -> None:
        self._changes = [change for change in self._changes if change.path.parent != path]
        self._safe_bytes.pop(path, None)

    def _before_rename(self, temporary: Path, target: Path) -> bytes | None:
        return target.read_bytes() if target.is_file() else None

    def _after_rename(self, before: bytes | None, result: None, temporary: Path, target: Path) -> None:
        self._safe_bytes.pop(target, None)
        if temporary in self._safe_bytes:
            self._safe_bytes[target] = self._safe_bytes.pop(temporary)

        def undo() -> None:
            target.rename(temporary)
            if before is not None:
                target.write_bytes(before)

        self._changes.append(_Change(target, undo))

    def _before_remove(self, path: Path) -> bytes:
        return path.read_bytes()

    def _after_remove(self, before: bytes, result: None, path: Path) -> None:
        self._safe_bytes.pop(path, None)
        self._changes.append(_Change(path, lambda: path.write_bytes(before) and None))

    def _after_remove_folder(self, before: None, result: None, path: Path) -> None:
        self._changes.append(_Change(path, lambda: path.mkdir(exist_ok=True)))

    def _made(self, path: Path) -> None:
        self._changes.append(_Change(path, lambda: path.unlink(missing_ok=True)))
