"""Trace folders that are damaged, hostile, or of another verb: one line each."""

import lzma
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockpilot.cli.main import main
from blockpilot.core.errors import InputError
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay.pilot_report import Reliability, compare, draw_reliability
from blockpilot.replay.pilot_training import TraceGroup, read_group, train_step
from blockpilot.replay.simulate import simulate
from blockpilot.replay.trace_files import TraceSet, shard_path
from tests.unit.replay import hostile
from tests.unit.replay.pieces import make_pair, run_collect


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    run_collect(make_pair(), folder, shard_size=8)
    return folder


@pytest.fixture
def folder(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "traces"))


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        list(TraceSet(folder))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("message", hostile.BAD_MANIFESTS)
def test_a_bad_manifest_is_one_line(folder: Path, message: str) -> None:
    hostile.change_manifest(folder, **hostile.BAD_MANIFESTS[message])
    refuse(folder, message)


@pytest.mark.parametrize("message", hostile.BAD_COLUMNS)
def test_a_bad_column_is_one_line(folder: Path, message: str) -> None:
    hostile.change_shard(folder, hostile.BAD_COLUMNS[message])
    refuse(folder, rf"shard-00000\.safetensors is damaged: its column {message}")


@pytest.mark.parametrize("message", hostile.BAD_STRINGS)
def test_bad_requests_are_one_line(folder: Path, message: str) -> None:
    hostile.change_shard(folder, dict, hostile.BAD_STRINGS[message])
    refuse(folder, message)


def test_a_shard_of_another_run_is_named(folder: Path, collected: Path) -> None:
    shutil.copy(shard_path(collected, 0), shard_path(folder, 1))
    refuse(folder, "holds 10 traces and its manifest counts 5")
    hostile.change_manifest(folder, is_complete=False)
    assert len(list(TraceSet(folder))) == 10
    hostile.change_shard(folder, hostile.put("prefill.hidden", lambda column: column[:, :-1]))
    refuse(folder, r"shard-00001\.safetensors is of another run than the shards before it")


def test_files_without_an_end_take_no_memory(folder: Path) -> None:
    shard_path(folder, 0).unlink()
    bomb = shard_path(folder, 0, is_compressed=True)
    for data in (bytes(400 << 20), (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}'):
        bomb.write_bytes(lzma.compress(data, preset=0))
        tracemalloc.start()
        refuse(folder, r"xz is damaged: ")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
        tracemalloc.stop()
    bomb.unlink()
    shard_path(folder, 0).symlink_to("/dev/zero")
    refuse(folder, r"is no file: delete it")


def test_a_walk_that_goes_nowhere_ends(collected: Path) -> None:
    trace = next(iter(TraceSet(collected)))
    still = replace(trace, emitted=np.zeros_like(trace.emitted))
    with pytest.raises(InputError, match="trace of 'p0' tells nothing about anchor 0: collect it again"):
        simulate(still, FixedPilot(8))


def test_traces_without_anchors_train_and_judge_nothing(collected: Path) -> None:
    found = TraceSet(collected)
    short = [replace(t, answer_ids=t.answer_ids[:1], emitted=t.emitted[:0], drafts={}) for t in found] * 2
    with pytest.raises(InputError, match="answers of one token"):
        train_step(TraceGroup(short, found.manifest))
    with pytest.raises(InputError, match="their answers have one token"):
        compare(list(found), short, [], StepCosts.linear(), load="flat")


def test_folders_whose_arrays_do_not_fit_are_not_read_together(folder: Path, collected: Path) -> None:
    hostile.change_shard(folder, hostile.put("prefill.hidden", lambda column: column[:, :-1]))
    with pytest.raises(InputError, match="were not collected alike: their widths differ"):
        read_group([collected, folder])


def test_names_of_tasks_are_no_formulas(tmp_path: Path) -> None:
    report = Reliability(0.1, [0.5], [0.5], 1)
    draw_reliability(tmp_path, {"$\\frac{evil$ \u4f60 <evil>": report, "_x": report, "all": report})
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png"}


@pytest.mark.parametrize("content", ["traces", "nothing", "text"])
def test_the_command_says_what_to_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, content: str) -> None:
    if content == "nothing":
        shutil.rmtree(folder)
    elif content == "text":
        hostile.change_manifest(folder, anchors=None, config={})
    assert main(["train-pilot", "--traces", str(folder), "--out", str(tmp_path / "out")]) == 2
    spoken = capsys.readouterr().err
    assert "Traceback" not in spoken and "nexpected" not in spoken and "blockpilot: error: " in spoken
