"""Folders of safetensors files, read and written as one mapping from name to tensor.

Reading is lazy: opening a folder reads only the headers, and a tensor leaves the disk when it is asked for, so a model
never lies in memory twice. Writing splits large models over several files with the index that the ecosystem expects.

Drafters ship at half the size of bfloat16, or less: a matrix `name` [rows, K] is kept as `name.codes` and
`name.scales` (bfloat16 [rows, K / 32]), weight = code * scale, one scale per 32 neighbours of a row. Codes have 8 bits
(int8 [rows, K]) or 6 (uint8 [rows, K * 3 / 4], `pack_six_bits`). Everything else (norms, convolution bases, ids) stays
as it is. The file's own metadata says so, so that no foreign tensor is taken for codes. They are read as the float32
weights that they stand for; rounding those again to as many bits gives the same codes, bit for bit
(`BlockCodes.quantize`). `recipes/pack_drafter.py` writes such files.
"""

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, announce_read, atomic_path, ensure_folder, remove_for_good, write_text
from blockpilot.core.reading import read_json
from blockpilot.models.block_codes import BLOCK, BlockCodes, unpack_six_bits

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 10**9
STORAGE = "blockpilot_storage"
STORAGES = {8: "int8-blocks-32", 6: "int6-blocks-32"}  # by the bits of a code
CODES, SCALES = ".codes", ".scales"
MAX_NAME = 256
MAX_INDEX_BYTES = 64 * MEGABYTE
MAX_HEADER_BYTES = 64 * MEGABYTE  # a hundred for each of half a million tensors


class _Index(TypedDict):
    weight_map: dict[str, str]


class SafetensorsFolder(Mapping[str, Tensor]):
    """Name -> tensor over all weight files of a folder; tensors are read when they are asked for."""

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._sources: dict[str, tuple[Path, Any, list[str]]] = {}  # name -> file, its handle, stored tensors
        for path in files:
            try:
                _check_header(path)
                handle: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} is truncated or no safetensors file ({error}); fetch it again") from error
            stored = _stored_names(list(handle.keys()), handle.metadata() or {}, str(path))
            self._sources |= {name: (path, handle, parts) for name, parts in stored.items()}
        self.is_packed = any(len(parts) > 1 for _, _, parts in self._sources.values())

    def __getitem__(self, name: str) -> Tensor:
        parts = self._read(name)
        if len(parts) == 1:
            return parts[0]
        return torch.from_numpy(_join(*parts, where=f"{self._sources[name][0]}: {name}").dequantize())

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        _, handle, stored = self._sources[name]
        shape = tuple(handle.get_slice(stored[-1]).get_shape())
        return shape if len(stored) == 1 else (*shape[:-1], shape[-1] * BLOCK)

    def _read(self, name: str) -> list[Tensor]:
        from safetensors import SafetensorError

        path, handle, stored = self._sources[name]
        try:
            return [handle.get_tensor(part) for part in stored]
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: tensor {name} cannot be read ({error}); fetch the file again") from error

    def require_codes(self, name: str) -> BlockCodes:
        """The codes that a matrix is stored as."""
        path, _, stored = self._sources[name]
        if len(stored) == 1:
            raise InputError(f"{path}: {name} is not stored in codes: add --quantize q8_0, or use --dtype float32")
        return _join(*self._read(name), where=f"{path}: {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _check_header(path: Path) -> None:
    """The library reads headers of any size that the file has."""
    announce_read(path)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        what = f"its header would have {size} bytes, and may have {MAX_HEADER_BYTES}"
        raise InputError(f"{path} is truncated or no safetensors file ({what}); fetch it again")


def _stored_names(names: list[str], metadata: dict[str, str], where: str) -> dict[str, list[str]]:
    """What each tensor of a file is made of: itself, or codes and scales."""
    if odd := next((name for name in names if not name.isprintable() or len(name) > MAX_NAME), None):
        raise InputError(f"{where}: {odd[:MAX_NAME]!r} is no name of a tensor; fetch the file again")
    storage = metadata.get(STORAGE)
    if storage is None:
        return {name: [name] for name in names}
    if storage not in STORAGES.values():
        known = " and ".join(map(repr, STORAGES.values()))
        raise InputError(f"{where}: {STORAGE} {storage[:MAX_NAME]!r} is not known (only {known})")
    plain = {name: [name] for name in names if not name.endswith((CODES, SCALES))}
    packed = [name.removesuffix(CODES) for name in names if name.endswith(CODES)]
    scaled = {name.removesuffix(SCALES) for name in names if name.endswith(SCALES)}
    if alone := sorted(scaled.symmetric_difference(packed)):
        what = f"tensor {alone[0]} cannot be read: it has codes or scales alone"
        raise InputError(f"{where}: {what}; fetch the file again")
    return plain | {name: [name + CODES, name + SCALES] for name in packed}


def _join(codes: Tensor, scales: Tensor, *, where: str) -> BlockCodes:
    """The codes of a matrix [rows, K], as they are stored, and their scales."""
    bytes_of_block = {torch.int8: BLOCK, torch.uint8: BLOCK * 3 // 4}.get(codes.dtype, 0)
    is_matrix = bytes_of_block and scales.dim() == 2 and scales.is_floating_point()
    if not is_matrix or codes.shape != (len(scales), scales.shape[1] * bytes_of_block):
        raise InputError(f"{where}: codes {list(codes.shape)} and scales {list(scales.shape)} do not belong together")
    plain = codes.numpy() if codes.dtype == torch.int8 else unpack_six_bits(codes.numpy())
    return BlockCodes(plain, scales.float().numpy())


def read_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """Open the weights of a folder: the shards its index names, or its single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        return SafetensorsFolder(_indexed_files(index))
    if not (folder / SINGLE_FILE).is_file():
        raise InputError(f"{folder} holds no weights: expected {SINGLE_FILE} or {INDEX_FILE}")
    return SafetensorsFolder([folder / SINGLE_FILE])


def _indexed_files(index: Path) -> list[Path]:
    """Files beside the index alone: it comes with the model, from wherever that was fetched."""
    found = read_json(index, _Index, "it is not a readable weight index: fetch the model again", most=MAX_INDEX_BYTES)
    names = sorted(set(found["weight_map"].values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.isprintable() or not name.endswith(".safetensors"):
            raise InputError(f"{index}: weight_map names {name[:80]!r}, which is no safetensors file of this folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        rest = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        listed = ", ".join(missing[:8]) + rest
        raise InputError(f"{index.parent}: weight files are missing: {listed}; fetch the model again")
    return [index.parent / name for name in names]


def write_safetensors_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all tensors, in one file where they fit and else in shards with an index; older weight files go."""
    from safetensors import SafetensorError
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
            try:
                save_file(plain, str(temporary), metadata=dict(metadata))
            except SafetensorError as error:  # how the library reports a full disk
                raise OSError(errno.EIO, str(error)) from error
    if count > 1:
        content = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {member: name for name, members in zip(names, shards, strict=True) for member in members},
        }
        write_text(folder / INDEX_FILE, json.dumps(content, indent=2) + "\n")
        names.append(INDEX_FILE)
    # a folder with both forms of weights would be read differently by different programs; without an index its shards
    # are nothing, so that goes first
    files = [folder / INDEX_FILE, *folder.glob("model*.safetensors")]
    if old := [path for path in files if path.name not in names and path.exists()]:
        remove_for_good(folder, old)


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
