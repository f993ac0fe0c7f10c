"""The script that makes the traces to ship: what they keep, what they leave out, and which sources are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import make_compact_traces
import numpy as np
import pytest

from blockpilot.core.errors import InputError
from blockpilot.core.manifests import write_manifest
from blockpilot.replay.pilot_training import tau_table
from blockpilot.replay.trace_files import TraceSet, shipped_traces
from tests.unit.replay.pieces import SIZES, make_pair, run_collect
from tests.unit.studies.pieces import make_trace, write_traces


def test_test_prompts_and_other_licences_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def run(task: str, split: str) -> None:
        traces = [make_trace(f"p{place}", 14 + place, task=task) for place in range(5)]
        source = write_traces(tmp_path / f"{task}-{split}", traces)
        facts = {"prompt_files": [{"name": f"{task}.jsonl.gz"}], "split": split}
        write_manifest(source, {**TraceSet(source).manifest, **facts})
        monkeypatch.setattr("sys.argv", ["x", "--traces", str(source), "--out", str(out)])
        make_compact_traces.main()

    with pytest.raises(SystemExit, match="holds test prompts"):
        run("gsm8k_test", "all")
    with pytest.raises(SystemExit, match="'alpaca' is not known to allow shipping"):
        run("alpaca", "all")
    assert not out.exists()
    run("gsm8k_train", "all")
    assert "5 traces in" in capsys.readouterr().out
    assert TraceSet(out).manifest["licences"] == {"gsm8k_train": "MIT, openai/grade-school-math"}
    assert "| gsm8k_train | 5 | MIT, openai/grade-school-math |" in (out / "NOTICE.md").read_text()
    with pytest.raises(SystemExit, match="holds traces already"):
        run("gsm8k_test", "calibration")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces") / "full"
    run_collect(make_pair(), root)
    return root


@pytest.fixture(autouse=True)
def known_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_compact_traces.LICENCES, "tiny", "MIT, made up")


def make(folder: Path, out: Path, **settings: Any) -> TraceSet:
    return make_compact_traces.write_compact([folder], out, **settings)


def test_whole_requests_stay_and_drafts_go(folder: Path, tmp_path: Path) -> None:
    full, found = TraceSet(folder), make(folder, tmp_path / "a", mass=1.0)
    assert len(found) == len(full) == found.manifest["num_traces"] and len(found.shards) == 1
    np.testing.assert_array_equal(tau_table(found, SIZES), tau_table(full, SIZES))
    for trace, whole in zip(found, full, strict=True):
        assert not trace.drafts and trace.prompt_id == whole.prompt_id and trace.setting == whole.setting
        np.testing.assert_array_equal(trace.answer_ids, whole.answer_ids)
        ours, theirs = trace.prefill_state(), whole.prefill_state()
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, rtol=2**-8)
        np.testing.assert_allclose(ours.hidden, theirs.hidden, rtol=1e-3, atol=1e-6)


def test_the_likeliest_tokens_are_kept_up_to_the_mass(folder: Path, tmp_path: Path) -> None:
    whole = [trace.prefill for trace in TraceSet(folder)]
    for cut, prefill in zip(make(folder, tmp_path / "a", mass=0.5), whole, strict=True):
        count = len(cut.prefill.token_ids)
        assert (np.diff(cut.prefill.token_ids) > 0).all() and count < len(prefill.token_ids)
        assert set(cut.prefill.token_ids) == set(prefill.token_ids[:count])
        assert prefill.probabilities[: count - 1].sum() < 0.5 <= prefill.probabilities[:count].sum()
        assert cut.prefill.mass == pytest.approx(prefill.probabilities[:count].sum(), rel=2**-8)
        assert cut.prefill.entropy == pytest.approx(prefill.entropy)
    few = make(folder, tmp_path / "b", max_tokens=2)
    assert all(len(trace.prefill.token_ids) == 2 for trace in few)


def test_the_same_traces_give_the_same_files_and_name_their_sources(folder: Path, tmp_path: Path) -> None:
    first, second = (make(folder, tmp_path / name) for name in "ab")
    assert first.shards[0].read_bytes() == second.shards[0].read_bytes()
    assert first.manifest == second.manifest and first.is_complete
    full = TraceSet(folder).manifest
    assert first.manifest["licences"] == {"tiny": "MIT, made up"} and first.manifest["num_traces_by_task"] == {
        "tiny": 5
    }
    assert first.manifest["sources"][0]["requests_sha256"] == full["requests_sha256"]
    assert first.shards[0].stat().st_size < sum(path.stat().st_size for path in TraceSet(folder).shards) / 4


def test_refusals(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="bytes are more than 100: keep less mass"):
        make(folder, tmp_path / "a", max_bytes=100)
    with pytest.raises(InputError, match="licence of the prompts of 'tiny' is not known"):
        monkeypatch.delitem(make_compact_traces.LICENCES, "tiny")
        make(folder, tmp_path / "a")
    monkeypatch.setitem(make_compact_traces.LICENCES, "tiny", "MIT, made up")
    with pytest.raises(InputError, match="keep some"):
        make(folder, tmp_path / "a", mass=0)
    assert not (tmp_path / "a").exists()
    make(folder, tmp_path / "a")
    with pytest.raises(InputError, match="holds traces already"):
        make(folder, tmp_path / "a")
    (tmp_path / "a" / "shard-00000.safetensors.xz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match="is damaged"):
        list(TraceSet(tmp_path / "a"))


def test_only_preset_targets_have_shipped_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("blockpilot.replay.trace_files.ASSETS", tmp_path)
    assert shipped_traces("tiny") is None
    make(folder, tmp_path / "tiny-traces")
    assert shipped_traces("tiny") == tmp_path / "tiny-traces" and shipped_traces("some/tiny") is None


def test_unfinished_folders_only_where_asked_for(folder: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(folder, unfinished)
    manifest = json.loads((unfinished / "manifest.json").read_text())
    (unfinished / "manifest.json").write_text(json.dumps(manifest | {"is_complete": False}))
    with pytest.raises(InputError, match="not complete"):
        make(unfinished, tmp_path / "a")
    found = make(unfinished, tmp_path / "b", is_partial=True)
    assert len(found) == len(TraceSet(folder)) and found.manifest["sources"][0]["is_complete"] is False
