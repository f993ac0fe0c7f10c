"""Traces small enough to ship: what they keep, what they leave out, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from blockpilot.core.errors import InputError
from blockpilot.replay.compact import Kept, shipped_traces, write_compact
from blockpilot.replay.pilot_training import tau_table
from blockpilot.replay.trace_files import TraceSet
from tests.unit.replay.pieces import SIZES, make_pair, run_collect

LICENCES = {"tiny": "MIT, made up"}
MANY = 10**6
DEFAULT = Kept()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces") / "full"
    run_collect(make_pair(), root)
    return root


def make(folder: Path, out: Path, *, kept: Kept = DEFAULT, max_bytes: int = MANY) -> TraceSet:
    return write_compact([folder], out, kept=kept, max_bytes=max_bytes, licences=LICENCES)


def test_whole_requests_stay_and_drafts_go(folder: Path, tmp_path: Path) -> None:
    full, found = TraceSet(folder), make(folder, tmp_path / "a", kept=Kept(mass=1.0))
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
    for cut, prefill in zip(make(folder, tmp_path / "a", kept=Kept(mass=0.5)), whole, strict=True):
        count = len(cut.prefill.token_ids)
        assert (np.diff(cut.prefill.token_ids) > 0).all() and count < len(prefill.token_ids)
        assert set(cut.prefill.token_ids) == set(prefill.token_ids[:count])
        assert prefill.probabilities[: count - 1].sum() < 0.5 <= prefill.probabilities[:count].sum()
        assert cut.prefill.mass == pytest.approx(prefill.probabilities[:count].sum(), rel=2**-8)
        assert cut.prefill.entropy == pytest.approx(prefill.entropy)
    few = make(folder, tmp_path / "b", kept=Kept(max_tokens=2))
    assert all(len(trace.prefill.token_ids) == 2 for trace in few)


def test_the_same_traces_give_the_same_files_and_name_their_sources(folder: Path, tmp_path: Path) -> None:
    first, second = (make(folder, tmp_path / name) for name in "ab")
    assert first.shards[0].read_bytes() == second.shards[0].read_bytes()
    assert first.manifest == second.manifest and first.is_complete
    full = TraceSet(folder).manifest
    assert first.manifest["licences"] == LICENCES and first.manifest["num_traces_by_task"] == {"tiny": 5}
    assert first.manifest["sources"][0]["requests_sha256"] == full["requests_sha256"]
    assert first.shards[0].stat().st_size < sum(path.stat().st_size for path in TraceSet(folder).shards) / 4


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bytes are more than 100: keep less mass"):
        make(folder, tmp_path / "a", max_bytes=100)
    with pytest.raises(InputError, match="licence of the prompts of 'tiny' is not known"):
        write_compact([folder], tmp_path / "a", kept=Kept(), max_bytes=MANY, licences={})
    with pytest.raises(InputError, match="keep some"):
        Kept(mass=0)
    assert not (tmp_path / "a").exists()
    make(folder, tmp_path / "a")
    with pytest.raises(InputError, match="holds traces already"):
        make(folder, tmp_path / "a")
    (tmp_path / "a" / "shard-00000.safetensors.xz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match="is damaged"):
        list(TraceSet(tmp_path / "a"))


def test_only_preset_targets_have_shipped_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("blockpilot.replay.compact.ASSETS", tmp_path)
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
    found = write_compact(
        [unfinished], tmp_path / "b", kept=DEFAULT, max_bytes=MANY, licences=LICENCES, is_partial=True
    )
    assert len(found) == len(TraceSet(folder)) and found.manifest["sources"][0]["is_complete"] is False
