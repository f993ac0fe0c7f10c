"""Manifests: damaged ones are named, and only a run of the same making goes on."""

import json
from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.core.manifests import MANIFEST, read_manifest, require_same_run, write_manifest


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 99}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(InputError, match=MANIFEST):
        read_manifest(tmp_path)


def test_a_manifest_carries_its_version(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, {"config": {"seed": 1}})
    assert json.loads((tmp_path / MANIFEST).read_text())["schema_version"] == 1


def test_a_difference_is_named_by_its_path_unless_it_is_free() -> None:
    found = {"config": {"seed": 1, "rows": 8, "more": {"kind": "a"}}, "counted": 5}
    wanted = {"config": {"seed": 1, "rows": 4, "more": {"kind": "a"}}}
    assert require_same_run(Path("out"), found, wanted, free=("rows",)) == {"config.rows": (8, 4)}
    with pytest.raises(InputError, match=r"out belongs to another run: config\.rows is 8 there and 4 here; choose"):
        require_same_run(Path("out"), found, wanted)
    with pytest.raises(InputError, match=r"config\.more\.size is None there and 1 here"):
        require_same_run(Path("out"), found, {"config": {"seed": 1, "rows": 8, "more": {"size": 1}}})
