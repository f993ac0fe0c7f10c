"""Manifests: damaged ones are named, and only a run of the same making goes on."""

import json
from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.core.manifests import (
    MANIFEST,
    TEXTS,
    TRACES,
    find_content,
    open_run,
    read_manifest,
    require_content,
    require_room,
    require_same_run,
    write_manifest,
)

TEXT_RUN = {"config": {"seed": 1}}
TRACE_RUN = {"anchors": "every", "draft_sizes": []}
BENCH_RUN = {"id": "a", "arguments": {}, "methods": {}}


DAMAGED = ["{", "[]", "{}", "[" * 100_000, "\0" * 100, '{"schema_version": 99}', '{"schema_version": "\\ud800"}']


@pytest.mark.parametrize("content", DAMAGED)
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


def test_an_error_stays_one_line_whatever_a_manifest_says(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": "a\nb" * 1000}))
    nested = 0
    for _ in range(900):
        nested = {"a\nb": nested}
    for check in (
        lambda: read_manifest(tmp_path),
        lambda: require_same_run(tmp_path, {"config": {"a\nb": "x\n" * 1000}}, {"config": {"a": 1}}),
        lambda: require_same_run(tmp_path, {"config": nested}, {"config": {"a": 1}}),
    ):
        with pytest.raises(InputError) as caught:
            check()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("manifest", "file", "message"),
    [
        (TEXT_RUN, None, "holds training text of `blockpilot synthesize`, no traces: give a folder of `.* collect`"),
        (BENCH_RUN, None, "holds results of `blockpilot bench`, no traces"),
        (None, "pilot.json", "holds a pilot of `blockpilot train-pilot`, no traces"),
        (None, "checkpoint.pt", "holds checkpoints of `blockpilot train-drafter`, no traces"),
        (None, "config.json", "holds a model, no traces"),
    ],
)
def test_a_folder_of_another_verb_is_named(
    tmp_path: Path, manifest: dict[str, object] | None, file: str | None, message: str
) -> None:
    if manifest is not None:
        (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    if file is not None:
        (tmp_path / file).write_text("")
    with pytest.raises(InputError, match=message):
        read_manifest(tmp_path, TRACES)
    with pytest.raises(InputError, match="choose another --out"):
        open_run(tmp_path, TRACE_RUN)


def test_a_folder_of_the_wanted_kind_passes(tmp_path: Path) -> None:
    for content, run in ((TRACES, TRACE_RUN), (TEXTS, TEXT_RUN)):
        folder = tmp_path / content
        require_content(folder, content)
        open_run(folder, run)
        open_run(folder, run)
        assert find_content(folder) == content and read_manifest(folder, content) is not None
        require_room(folder, content)


def test_a_manifest_without_an_end_is_no_file(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).symlink_to("/dev/zero")
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).unlink()
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="larger than 16 MB"):
        read_manifest(tmp_path)
