"""`blockpilot models` on a pretended preset: nothing is downloaded."""

import json
from pathlib import Path

import pytest

from blockpilot.cli.main import main
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models import export, presets

ROW = {
    "name": "tiny",
    "kind": "target",
    "path": "/models/tiny.gguf",
    "bytes": 2_000_000,
    "sha256": "ab",
    "cached": True,
}


@pytest.fixture(autouse=True)
def fake_presets(monkeypatch):
    def fetch(name, progress):
        progress("downloading tiny", 1, 2_000_000)
        progress("downloading tiny", 2_000_000, 2_000_000)
        return Path("/models/tiny.gguf")

    monkeypatch.setattr(presets, "list_presets", lambda: [dict(ROW)])
    monkeypatch.setattr(presets, "fetch_preset", fetch)
    monkeypatch.setattr(presets, "verify_preset", lambda name: Path("/models/tiny.gguf"))


def fail_with(error):
    def function(*arguments):
        raise error

    return function


def test_list_as_json(capsys):
    assert main(["models", "list", "--json"]) == 0
    first, *shipped = json.loads(capsys.readouterr().out)["models"]
    assert first == ROW
    assert [(row["name"], row["kind"], row["cached"]) for row in shipped] == [
        ("smollm2-135m-dflash2", "drafter", True),
        ("smollm2-135m-eagle3", "drafter", True),
        ("smollm2-135m-dflash", "drafter", True),
    ]
    assert all(set(row) == set(ROW) for row in shipped)


def test_list_for_people(capsys, monkeypatch):
    absent = ROW | {"name": "other", "path": None, "cached": False}
    monkeypatch.setattr(presets, "list_presets", lambda: [ROW, absent])
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["tiny", "target", "2.0", "MB", "yes", "/models/tiny.gguf"]
    assert lines[2].split() == ["other", "target", "2.0", "MB", "no", "-"]


@pytest.mark.parametrize("action", ["fetch", "verify"])
def test_fetch_and_verify(action, capsys):
    assert main(["models", action, "tiny"]) == 0
    assert "/models/tiny.gguf" in capsys.readouterr().out
    assert main(["models", action, "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ROW


def test_fetch_tells_a_log_once_what_it_downloads(capsys):
    assert main(["models", "fetch", "tiny"]) == 0
    assert capsys.readouterr().err == "downloading tiny (2.0 MB)\n"


@pytest.mark.parametrize(("error", "exit_code"), [(BlockPilotError("wrong checksum"), 1), (InputError("unknown"), 2)])
def test_verify_failures(error, exit_code, monkeypatch, capsys):
    monkeypatch.setattr(presets, "verify_preset", fail_with(error))
    assert main(["models", "verify", "tiny", "--json"]) == exit_code
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"blockpilot: error: {error}\n")


def test_export(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(export, "export_target", lambda spec, out, progress: out)
    assert main(["models", "export", "tiny", "--out", str(tmp_path / "out")]) == 0
    assert f"tiny is written to {tmp_path / 'out'}" in capsys.readouterr().out
    assert main(["models", "export", "tiny", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "tiny", "kind": "target", "path": str(tmp_path / "out")}
