"""Drafters that ship with the package."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockpilot.core.errors import BlockPilotError
from blockpilot.models import shipped
from blockpilot.models.dflash_format import HEAD_ROWS
from blockpilot.models.export import MARKER, export_drafter, public_drafter
from blockpilot.models.loading import load_drafter
from blockpilot.models.tensor_files import read_safetensors_folder


def test_every_shipped_drafter_is_whole_and_has_a_card() -> None:
    for row in shipped.list_shipped():
        folder = shipped.verify_shipped(row["name"])
        assert (folder / "model.safetensors").stat().st_size == row["bytes"] <= 15_000_000
        assert (folder / "README.md").is_file()
    assert sum(row["bytes"] for row in shipped.list_shipped()) < 26_000_000


def test_the_default_target_has_one() -> None:
    assert shipped.shipped_drafter("smollm2-135m") == "smollm2-135m-dflash2"
    assert shipped.shipped_drafter("some/model") is None
    assert shipped.default_drafter("smollm2-135m") == "smollm2-135m-dflash2"
    assert shipped.default_drafter("some/model") == "ngram"


def test_damage_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    (tmp_path / "smollm2-135m-dflash2").mkdir()
    (tmp_path / "smollm2-135m-dflash2" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(BlockPilotError, match="damaged"):
        shipped.verify_shipped("smollm2-135m-dflash2")
    with pytest.raises(BlockPilotError, match="install the package again"):
        load_drafter("smollm2-135m-dflash2", torch.float32)


def test_export_leaves_out_what_only_we_read(tmp_path: Path) -> None:
    ours = load_drafter("smollm2-135m-dflash2", torch.bfloat16)
    theirs = load_drafter(str(export_drafter("smollm2-135m-dflash2", tmp_path / "out")), torch.bfloat16)
    assert ours.draft_token_ids is not None and theirs.draft_token_ids is None
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_other_engines_get_the_exported_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    folder = Path(public_drafter("smollm2-135m-dflash"))
    assert folder.name == "smollm2-135m-dflash" and not read_safetensors_folder(folder).is_packed
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert public_drafter(str(folder)) == public_drafter("smollm2-135m-dflash") == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "it was written again"


def test_a_damaged_exported_form_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    path = Path(public_drafter("smollm2-135m-dflash")) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (path.parent / MARKER).unlink()
    assert Path(public_drafter("smollm2-135m-dflash")) / "model.safetensors" == path
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", list(shipped.DRAFTERS))
def test_export_writes_plain_bfloat16_that_any_reader_takes(name: str, tmp_path: Path) -> None:
    stored = load_file(export_drafter(name, tmp_path / "out") / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()} == {torch.bfloat16}
    ours = read_safetensors_folder(shipped.ASSETS / name)
    assert ours.is_packed and set(ours) - {HEAD_ROWS} == set(stored)
    assert all(torch.equal(stored[key], ours[key].to(stored[key].dtype)) for key in stored)
