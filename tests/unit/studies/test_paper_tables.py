"""The paper's tables end to end on tiny models, piece by piece; its claims on made-up rows."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paper_tables
import pytest
from paper_study import running
from paper_study.claims import CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE, judge
from paper_study.evidence import Evidence, Half
from paper_study.plan import Stage
from paper_study.running import StageError, run_stages

from blockpilot.cli.main import main
from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target

TASKS = {"gsm8k": "gsm8k_test", "mt_bench": "mt_bench"}


def write_prompts(path: Path, name: str, count: int) -> Path:
    lines = [json.dumps({"id": f"{name}{place}", "prompt": f"{name} {place}", "answer": "7"}) for place in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    save_target(folder / "target")
    save_dflash(make_dflash(), folder / "drafter")
    (folder / "data").mkdir()
    for name, file in TASKS.items():
        write_prompts(folder / "data" / f"{file}.jsonl", name, 8)
    write_prompts(folder / "copa.jsonl", "copa", 10)
    return folder


def words(folder: Path, out: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--data", str(folder / "data")]
    small = ["--tasks", ",".join(TASKS), "--sizes", "4-12,16,32", "--num-prompts", "2", "--replay-prompts", "4"]
    small += ["--max-new-tokens", "72", "--temperatures", "0", "--quick"]
    return [*pair, *small, "--pilot-prompts", str(folder / "copa.jsonl"), "--out", str(out), *more]


def run_here(words: Sequence[str], seconds: float | None) -> bool:
    """As a process of its own would."""
    if words[:2] == ("-m", "blockpilot"):
        assert main(words[2:]) == 0
    else:
        before = sys.argv
        sys.argv = list(words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        finally:
            sys.argv = before
    return True


def test_a_study_goes_on_where_it_stopped_and_judges_every_claim(
    folder: Path, tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "out", []

    def run_some(words: Sequence[str], seconds: float | None) -> bool:
        done.append(words)
        return len(done) != 4 and run_here(words, seconds)

    monkeypatch.setattr(running, "run_command", run_some)
    assert run(folder, out, monkeypatch) == paper_tables.TIME_IS_UP
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "Table 2 is not finished for T = 0." in report and "(T = 0): not testable here." in report
    assert run(folder, out, monkeypatch) == 0
    assert len(done) == 4 + 5 and done[3] == done[4]  # six stages of a temperature, scores, the network
    report = (out / "report.md").read_text(encoding="utf-8")
    for part in ("## Table 2", "| **dflash:4** |", "Task scores, T = 0", "### 3a, T = 0", "### Table 1, T = 0"):
        assert part.replace("**", "") in report.replace("**", ""), part
    assert "**Lossless acceleration: confirmed.** 0 mismatches" in report
    assert (
        "paper: Qwen3-4B" in report and "| 3.99 / 6.31 |" in report and "![Figures 3a to 3c](figure_3_t0.svg)" in report
    )
    assert "No row of both" in report and "EAGLE-3 is left out" in report
    assert "copa.jsonl. Whether the drafter was, too, was not checked" in report
    assert (out / "bench-report" / "report.html").is_file()
    for name in ("traces", "sweeps", "held-out", "pilots"):  # nothing that is left needs them
        shutil.rmtree(out / name)
    count = len(done)
    assert run(folder, out, monkeypatch) == 0 and run(folder, out, monkeypatch, "--report") == 0 and len(done) == count
    assert (out / "report.md").read_text(encoding="utf-8") == report


def run(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    monkeypatch.setattr("sys.argv", ["paper_tables.py", *words(folder, out, *more)])
    with pytest.raises(SystemExit) as ended:
        paper_tables.main()
    return ended.value.code


def test_what_is_wrong_is_one_line_before_anything_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "run_command", lambda *_: False)
    out = tmp_path / "out"
    assert run(folder, out, monkeypatch) == paper_tables.TIME_IS_UP
    bad: dict[str, list[str]] = {
        "belongs to another run: max_new_tokens is 72 there and 80 here": ["--max-new-tokens", "80"],
        "prompt file no.jsonl does not exist": ["--pilot-prompts", "no.jsonl"],
        "task aime24: .* holds no aime24.jsonl.gz": ["--tasks", "aime24"],
        "unknown task 'x'": ["--tasks", "x"],
    }
    for line, more in bad.items():
        caplog.clear()
        assert run(folder, out, monkeypatch, *more) == 2
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("paper_tables: ") and len(caplog.messages[0].splitlines()) == 1
        assert re.search(line, caplog.messages[0]), caplog.messages[0]
    assert run(folder, folder / "data", monkeypatch) == 2 and "holds other files" in caplog.messages[-1]


def test_a_stage_that_takes_too_long_is_stopped_and_a_broken_one_is_told(tmp_path: Path) -> None:
    slow = Stage("slow", ("-c", "import time; time.sleep(60)"), tmp_path / "never")
    assert not running.run_command(slow.words, 0.5)
    assert run_stages([slow], 0.0) is slow
    with pytest.raises(StageError, match="exit code 5"):
        running.run_command(("-c", "raise SystemExit(5)"), None)
    with pytest.raises(StageError, match="'idle' ended without"):
        run_stages([Stage("idle", ("-c", ""), tmp_path / "never")], None)
    made = tmp_path / "made"
    made.write_text("", encoding="utf-8")
    assert run_stages([Stage("done", (), made)], 0.0) is None


def make_half(temperature: float, gain: float, spread: float = 0.01) -> Half:
    """Made-up rows of the networks over 40 requests."""

    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": value - spread, "high": value + spread}

    shared = {
        "experiment": "prefill",
        "task": "all",
        "num_requests": 40,
        "best_fixed": 16,
        "sizes": [14, 15, 16, 17, 18],
    }
    shared |= {"accuracy": 0.3, "accuracy_of_best_fixed": 0.4, "group": "main"}
    names = {"as published": 0.0, "k = 1": -0.1, "k = 3": -0.1, "inputs: logits": 0.0, "inputs: softmax": -0.1}
    rows = [
        shared
        | {"name": name, "tau": around(6 + gain + lost), "gain_over_trained": around(gain + lost)}
        | {"gain_over_best_fixed": around(gain - 0.02)}
        for name, lost in names.items()
    ]
    split = {"experiment": "split", "split": "halves", "task": "all", "num_requests": 40}
    split |= {"gain_over_best_fixed": around(-gain), "oracle_gain_over_best_fixed": around(0.05)}
    return Half(temperature, None, None, [*rows, split])


def test_claims_follow_from_the_rows() -> None:
    halves = [make_half(0.0, 0.015), make_half(1.0, 0.1)]
    config = paper_tables.read_config(paper_tables.build_parser().parse_args(["--out", "x", "--pilot-prompts", "y"]))
    found = {one.claim: one for one in judge(Evidence(config, 16, False, halves, None, []))}
    verdicts = {claim: one.verdict for claim, one in found.items()}
    assert verdicts["The best block size is a property of the request (T = 1)"] == NOT_CONFIRMED
    assert verdicts["A longer acceptance length than DFlash at the trained size (T = 0)"] == CONFIRMED
    assert verdicts["Better than one size for all requests (T = 0)"] == NOT_CONFIRMED
    assert verdicts["Better than one size for all requests (T = 1)"] == CONFIRMED
    assert verdicts["k = 2 is the best radius (T = 1)"] == CONFIRMED
    assert verdicts["Raw probabilities are the best input (T = 1)"] == NOT_CONFIRMED
    assert verdicts["The gain is larger at T = 1 than at T = 0"] == CONFIRMED
    assert found["The gain is larger at T = 1 than at T = 0"].found.startswith("T = 1: +10.0% [+9.0%, +11.0%]")
    missing = (
        "Faster than DFlash at the trained size (T = 0)",
        "Lossless acceleration",
        "The network costs next to nothing",
    )
    assert {verdicts[claim] for claim in missing} == {NOT_TESTABLE}


def test_what_the_drafter_was_trained_on_is_said(tmp_path: Path) -> None:
    words = ["--out", "x", "--pilot-prompts", "a/copa.jsonl", "wsc.txt"]
    config = paper_tables.read_config(paper_tables.build_parser().parse_args(words))
    for key, names, told in (
        ("excluded_files", ["b/copa.jsonl", "wsc.txt"], "were left out of the drafter's text"),
        ("excluded_files", ["copa.jsonl"], "shared words were not looked for"),
        ("prompt_files", ["c/wsc.txt"], "The drafter was trained on wsc.txt, too"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({"config": {key: names}}), encoding="utf-8")
        assert told in paper_tables._tell_prompts(config, tmp_path)
