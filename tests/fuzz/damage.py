"""Bad files in place of good ones: other content by the kind of the file, or no proper file at all."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from tests.fuzz.mutations import (
    Mutation,
    change_bytes,
    change_compressed,
    change_json,
    change_safetensors,
    odd_gguf,
)
from tests.fuzz.templates import change_template
from tests.unit.models.hostile import model_fields
from tests.unit.report.hostile import change, find_places

SPARSE = 3 << 30  # bytes that a file seems to have


def damage_file(path: Path, files: list[Path], random: Random) -> str:
    """Change a file, or what stands under its name; `files` may take its place. Returns what was done."""
    if random.random() < 0.15:
        way = random.choice(_REPLACEMENTS)
        way(path, random.choice(files))
        return f"{way.__name__.strip('_')} {path}"
    mutation, data = _MUTATIONS.get(path.suffix, change_bytes), _read_start(path)
    try:
        path.write_bytes(mutation(data, random))
    except Exception:  # an earlier change has left nothing that could be read
        path.write_bytes(change_bytes(data, random))
    return f"{mutation.__name__.strip('_')} {path}"


def _read_start(path: Path) -> bytes:
    """Of a file that may have been made huge before."""
    with path.open("rb") as file:
        return file.read(1 << 24)


def _change_gguf(data: bytes, random: Random) -> bytes:
    return change_bytes(data, random) if random.random() < 0.5 else odd_gguf(model_fields(), random)


def _change_checkpoint(data: bytes, random: Random) -> bytes:
    """One value of the state, tensors among them, or a key; or bytes."""
    if random.random() < 0.3:
        return change_bytes(data, random)
    state = torch.load(io.BytesIO(data), weights_only=True)
    place = random.choice(list(find_places(state)))
    found = state
    for key in place:
        found = found[key]
    if isinstance(found, torch.Tensor):
        new = random.choice((found[None], found.double() * float("nan"), found.to(torch.int8), None, [found]))
    else:
        new = random.choice((place, None, -1, 1e300, [], {}, "x", (0.5,), float("nan"), [found], torch.zeros(2)))
    buffer = io.BytesIO()
    torch.save(change(state, place, new), buffer)
    return buffer.getvalue()


def _remove(path: Path, other: Path) -> None:
    path.unlink()


def _put_a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _put_a_loop(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _put_zeros_without_end(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _put_another(path: Path, other: Path) -> None:
    if other != path:
        shutil.copyfile(other, path)


def _make_huge(path: Path, other: Path) -> None:
    os.truncate(path, SPARSE)


def _make_a_pipe(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/null")


_REPLACEMENTS: tuple[Callable[[Path, Path], None], ...] = (
    _remove, _put_a_folder, _put_a_loop, _put_zeros_without_end, _put_another, _make_huge, _make_a_pipe
)  # fmt: skip
_MUTATIONS: dict[str, Mutation] = {
    ".json": change_json,
    ".jsonl": change_json,
    ".safetensors": change_safetensors,
    ".gguf": _change_gguf,
    ".jinja": change_template,
    ".gz": change_compressed,
    ".xz": change_compressed,
    ".pt": _change_checkpoint,
}
