import json
from pathlib import Path

import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.models.tensor_files import INDEX_FILE, SINGLE_FILE, read_safetensors_folder, write_safetensors_folder

TENSORS = {f"t{index}": torch.full((10,), float(index)) for index in range(5)}  # 40 bytes each


def test_single_file_round_trip(tmp_path: Path) -> None:
    write_safetensors_folder(tmp_path, TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]
    read = read_safetensors_folder(tmp_path)
    assert set(read) == set(TENSORS)
    assert len(read) == 5
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_shards_with_index(tmp_path: Path) -> None:
    write_safetensors_folder(tmp_path, TENSORS, max_shard_bytes=90)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    read = read_safetensors_folder(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_new_form_replaces_the_older_one(tmp_path: Path) -> None:
    write_safetensors_folder(tmp_path, TENSORS, max_shard_bytes=90)
    write_safetensors_folder(tmp_path, TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]
    write_safetensors_folder(tmp_path, TENSORS, max_shard_bytes=90)
    assert not (tmp_path / SINGLE_FILE).exists()


def test_rows_of_one_tensor_may_be_written_apart(tmp_path: Path) -> None:
    fused = torch.arange(12.0).view(6, 2)
    write_safetensors_folder(tmp_path, {"a": fused[:2], "b": fused[2:]})
    assert torch.equal(read_safetensors_folder(tmp_path)["b"], fused[2:])


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    write_safetensors_folder(tmp_path, TENSORS)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated"):
        read_safetensors_folder(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no weights"):
        read_safetensors_folder(tmp_path)
    write_safetensors_folder(tmp_path, TENSORS, max_shard_bytes=90)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="missing: model-00002-of-00003"):
        read_safetensors_folder(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(InputError, match="not a readable weight index"):
        read_safetensors_folder(tmp_path)
