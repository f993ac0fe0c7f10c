"""The script that makes the traces to ship: which sources it takes."""

from pathlib import Path

import make_compact_traces
import pytest

from blockpilot.replay.trace_files import TraceSet
from blockpilot.training.manifests import write_manifest
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
