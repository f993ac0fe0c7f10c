"""Weights stored in a byte each come back as the codes they were."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pack_drafter import pack_tensors, write_packed
from safetensors.torch import load_file, save_file
from torch import nn

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import pack_six_bits, unpack_six_bits
from blockpilot.models.eagle3_format import save_eagle3
from blockpilot.models.loading import load_drafter
from blockpilot.models.packing import quantize_linears
from blockpilot.models.shipped import DRAFTERS, shipped_folder
from blockpilot.models.tensor_files import (
    CODES,
    SCALES,
    SINGLE_FILE,
    STORAGE,
    STORAGES,
    read_safetensors_folder,
    write_safetensors_folder,
)


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = torch.logspace(-12, 3, 40)[:, None]  # far beyond what half precision could scale
    matrix = torch.randn(40, 96) * sizes
    matrix[3, 32:64] = 0
    return {"matrix": matrix, "norm": torch.randn(96), "odd": torch.randn(4, 33), "ids": torch.arange(64).view(2, 32)}


both_sizes = pytest.mark.parametrize(("bits", "dtype"), [(8, torch.int8), (6, torch.uint8)])


@both_sizes
def test_only_matrices_of_whole_blocks_are_packed(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    tensors = make_tensors()
    write_packed(tmp_path, tensors, bits)
    stored = load_file(tmp_path / SINGLE_FILE)
    assert set(stored) == {"matrix" + CODES, "matrix" + SCALES, "norm", "odd", "ids"}
    assert (stored["matrix" + CODES].dtype, stored["matrix" + SCALES].dtype) == (dtype, torch.bfloat16)
    assert stored["matrix" + CODES].shape == (40, 96 * bits // 8)
    read = read_safetensors_folder(tmp_path)
    assert read.shape("matrix") == (40, 96) and read.shape("odd") == (4, 33)
    assert set(read) == set(tensors) and len(read) == 4 and read.is_packed
    assert all(torch.equal(read[name], tensors[name]) for name in ("norm", "odd", "ids"))


@both_sizes
def test_a_weight_is_off_by_half_a_step_at_most(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    matrix = make_tensors()["matrix"]
    write_packed(tmp_path, {"matrix": matrix}, bits)
    largest = matrix.view(40, 3, 32).abs().amax(-1, keepdim=True).expand(40, 3, 32).reshape(40, 96)
    off = (read_safetensors_folder(tmp_path)["matrix"] - matrix).abs()
    assert bool((off <= largest / (2 ** (bits - 1) - 1) * 0.51).all())


@both_sizes
def test_packing_what_was_packed_gives_the_same_bytes(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    write_packed(tmp_path / "first", make_tensors(), bits)
    write_packed(tmp_path / "second", read_safetensors_folder(tmp_path / "first"), bits)
    first, second = ((tmp_path / name / SINGLE_FILE).read_bytes() for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_what_ships_is_what_a_cpu_multiplies_by(name: str) -> None:
    folder = shipped_folder(name)
    assert folder is not None
    stored, read = load_file(folder / SINGLE_FILE), read_safetensors_folder(folder)
    packed = pack_tensors(read)
    assert set(packed) == set(stored) and all(torch.equal(packed[key], stored[key]) for key in stored)
    linear = nn.Linear(read["fc.weight"].shape[1], len(read["fc.weight"]), bias=False)
    linear.weight = nn.Parameter(read["fc.weight"])
    quantize_linears(nn.ModuleList([linear]))
    (codes,) = linear.block_codes  # type: ignore[union-attr, misc]
    assert torch.equal(torch.from_numpy(codes.codes), stored["fc.weight.codes"])
    assert torch.equal(torch.from_numpy(codes.scales), stored["fc.weight.scales"].float())


@pytest.mark.parametrize("name", ["smollm2-135m-dflash2", "smollm2-135m-dflash"])
def test_rounding_a_loaded_drafter_changes_nothing(name: str) -> None:
    """Its fused layers too: rows keep their blocks."""
    model = load_drafter(name, torch.float32)
    before = [parameter.clone() for parameter in model.parameters()]
    quantize_linears(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(hasattr(layer, "block_codes") for layer in model.modules() if isinstance(layer, nn.Linear))


def test_an_eagle3_head_brings_its_codes_along(tmp_path: Path) -> None:
    """Its drafter rounds nothing by itself: a public checkpoint stays as it is."""
    packed = load_drafter("smollm2-135m-eagle3", torch.float32, num_target_layers=30)
    save_eagle3(packed, tmp_path)
    public = load_drafter(str(tmp_path), torch.float32, num_target_layers=30)
    assert all(torch.equal(a, b) for a, b in zip(packed.parameters(), public.parameters(), strict=True))
    assert hasattr(packed.lm_head, "block_codes") and not hasattr(public.lm_head, "block_codes")
    halves = load_drafter("smollm2-135m-eagle3", torch.bfloat16, num_target_layers=30)
    assert not hasattr(halves.lm_head, "block_codes")


def test_another_storage_and_torn_codes_are_named(tmp_path: Path) -> None:
    path, codes = tmp_path / SINGLE_FILE, torch.zeros(2, 64, dtype=torch.int8)
    save_file({"a": torch.ones(1)}, path, metadata={STORAGE: "int2"})
    with pytest.raises(
        InputError, match=r"blockpilot_storage 'int2' is not known \(only 'int8-blocks-32' and 'int6-blocks-32'\)"
    ):
        read_safetensors_folder(tmp_path)
    save_file({"a" + CODES: codes, "a" + SCALES: torch.ones(2, 3)}, path, metadata={STORAGE: STORAGES[8]})
    with pytest.raises(InputError, match=r"a: codes \[2, 64\] and scales \[2, 3\] do not belong together"):
        read_safetensors_folder(tmp_path)["a"]
    save_file({"a" + CODES: codes}, path, metadata={STORAGE: STORAGES[8]})
    with pytest.raises(InputError, match="tensor a cannot be read"):
        read_safetensors_folder(tmp_path)["a"]


def test_names_of_other_files_mean_nothing(tmp_path: Path) -> None:
    write_safetensors_folder(tmp_path, {"a" + CODES: torch.ones(1)})
    assert list(read_safetensors_folder(tmp_path)) == ["a" + CODES]


def test_every_code_of_six_bits_comes_back() -> None:
    codes = torch.randint(-32, 32, (5, 96), dtype=torch.int8).numpy()
    codes[0, :64] = np.arange(-32, 32)
    packed = pack_six_bits(codes)
    assert packed.shape == (5, 72) and (unpack_six_bits(packed) == codes).all()
