"""A trained drafter becomes the one that ships."""

import json
import sys
from pathlib import Path

import pack_drafter
import pytest
import torch

from blockpilot.core.files import hash_file
from blockpilot.models.export import export_drafter
from blockpilot.models.loading import load_drafter
from blockpilot.models.shipped import DRAFTERS, shipped_folder


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_packed_drafter_gives_the_shipped_bytes_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shipped_folder(name)
    monkeypatch.setattr(sys, "argv", ["pack_drafter.py", "--drafter", str(folder), "--out", str(tmp_path / "out")])
    pack_drafter.main()
    shipped = {"num_bytes": DRAFTERS[name].num_bytes, "sha256": DRAFTERS[name].sha256}
    assert json.loads(capsys.readouterr().out) == shipped
    assert folder is not None
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_public_folder_is_packed_to_half_its_size(tmp_path: Path) -> None:
    public = export_drafter("smollm2-135m-dflash", tmp_path / "public")
    weights = pack_drafter.pack(public, tmp_path / "packed")
    assert weights.stat().st_size < 0.54 * (public / "model.safetensors").stat().st_size
    ours, theirs = (load_drafter(str(tmp_path / name), torch.float32) for name in ("packed", "public"))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(b.abs().max()) / 127)
    assert hash_file(weights) == hash_file(pack_drafter.pack(tmp_path / "packed", tmp_path / "again"))
