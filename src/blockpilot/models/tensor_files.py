"""Folders of safetensors files, read and written as one mapping from name to tensor.

Reading is lazy: opening a folder reads only the headers, and a tensor leaves the disk when it is asked for, so a model
never lies in memory twice. Writing splits large models over several files with the index that the ecosystem expects.

Drafters ship at half the size of bfloat16: a matrix `name` [rows, K] is kept as `name.codes` (int8 [rows, K]) and
`name.scales` (bfloat16 [rows, K / 32]), weight = code * scale, one scale per 32 neighbours of a row. Everything else
(norms, convolution bases, ids) stays as it is. The file's own metadata says so, so that no foreign tensor is taken for
codes. They are read as the float32 weights that they stand for; rounding those again gives the same codes, bit for bit
(`BlockCodes.quantize`). `recipes/pack_drafter.py` writes such files.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, ensure_folder, write_text
from blockpilot.models.block_codes import BLOCK, BlockCodes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 10**9
STORAGE = "blockpilot_storage"
INT8_BLOCKS = "int8-blocks-32"
METADATA = {STORAGE: INT8_BLOCKS}  # this key alone: several are written in any order, and files would differ
CODES, SCALES = ".codes", ".scales"


class SafetensorsFolder(Mapping[str, Tensor]):
    """Name -> tensor over all weight files of a folder; tensors are read when they are asked for."""

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._sources: dict[str, tuple[Path, Any, list[str]]] = {}  # name -> file, its handle, stored tensors
        for path in files:
            try:
                handle: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} is truncated or no safetensors file ({error}); fetch it again") from error
            stored = _stored_names(list(handle.keys()), handle.metadata() or {}, str(path))
            self._sources |= {name: (path, handle, parts) for name, parts in stored.items()}
        self.is_packed = any(len(parts) > 1 for _, _, parts in self._sources.values())

    def __getitem__(self, name: str) -> Tensor:
        path, handle, stored = self._sources[name]
        try:
            parts: list[Tensor] = [handle.get_tensor(part) for part in stored]
        except Exception as error:  # the library raises its own type and OSError
            raise InputError(f"{path}: tensor {name} cannot be read ({error}); fetch the file again") from error
        return parts[0] if len(parts) == 1 else _unpack(*parts, where=f"{path}: {name}")

    def require_codes(self, name: str) -> BlockCodes:
        """The codes that a matrix is stored as."""
        path, handle, stored = self._sources[name]
        if len(stored) == 1:
            raise InputError(f"{path}: {name} is not stored in codes: add --quantize q8_0, or use --dtype float32")
        codes, scales = (handle.get_tensor(part) for part in stored)
        return BlockCodes(codes.numpy(), scales.float().numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _stored_names(names: list[str], metadata: dict[str, str], where: str) -> dict[str, list[str]]:
    """What each tensor of a file is made of: itself, or codes and scales."""
    storage = metadata.get(STORAGE)
    if storage is None:
        return {name: [name] for name in names}
    if storage != INT8_BLOCKS:
        raise InputError(f"{where}: {STORAGE} {storage!r} is not known (only {INT8_BLOCKS!r})")
    plain = {name: [name] for name in names if not name.endswith((CODES, SCALES))}
    packed = [name.removesuffix(CODES) for name in names if name.endswith(CODES)]
    return plain | {name: [name + CODES, name + SCALES] for name in packed}


def _unpack(codes: Tensor, scales: Tensor, *, where: str) -> Tensor:
    """The float32 weights [rows, K] that codes and scales stand for."""
    is_matrix = codes.dtype == torch.int8 and scales.dim() == 2
    if not is_matrix or codes.shape != (len(scales), scales.shape[1] * BLOCK):
        raise InputError(f"{where}: codes {list(codes.shape)} and scales {list(scales.shape)} do not belong together")
    return torch.from_numpy(BlockCodes(codes.numpy(), scales.float().numpy()).dequantize())


def read_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """Open the weights of a folder: the shards its index names, or its single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        return SafetensorsFolder(_indexed_files(index))
    if not (folder / SINGLE_FILE).is_file():
        raise InputError(f"{folder} holds no weights: expected {SINGLE_FILE} or {INDEX_FILE}")
    return SafetensorsFolder([folder / SINGLE_FILE])


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not a readable weight index: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise InputError(f"{index.parent}: weight files are missing: {', '.join(missing)}; fetch the model again")
    return [index.parent / name for name in names]


def write_safetensors_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all tensors, in one file where they fit and else in shards with an index; older weight files go."""
    from safetensors.torch import save_file

    ensure_folder(folder)
    shards = _plan_shards(tensors, max_shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [SINGLE_FILE]
    for name, members in zip(names, shards, strict=True):
        with atomic_path(folder / name) as temporary:
            plain = {member: tensors[member].detach().contiguous() for member in members}
            save_file(plain, str(temporary), metadata=dict(metadata))
    if count > 1:
        content = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {member: name for name, members in zip(names, shards, strict=True) for member in members},
        }
        write_text(folder / INDEX_FILE, json.dumps(content, indent=2) + "\n")
    else:
        (folder / INDEX_FILE).unlink(missing_ok=True)
    # a folder with both forms of weights would be read differently by different programs
    for path in folder.glob("model*.safetensors"):
        if path.name not in names:
            path.unlink()


def _plan_shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards
