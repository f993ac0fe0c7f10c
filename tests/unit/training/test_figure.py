"""The curve of a run."""

import logging
import sys
from pathlib import Path

import pytest

from blockpilot.training.checkpoints import append_log
from blockpilot.training.figure import draw_curve

EVALUATION = {"tau_mean": 2.0, "tau_loop_free": 1.9, "tau_pooled": 2.1, "accuracy": [0.5, 0.25], "recall": [0.9, 0.7]}


def write_log(out: Path) -> None:
    for step in (10, 20, 30):
        append_log(out, {"step": step, "loss": 1 / step, "emitted": 2.0})
        append_log(out, {"step": step, "evaluation": EVALUATION})


def test_curves_are_drawn_and_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_log(tmp_path)
    assert [path.name for path in draw_curve(tmp_path)] == ["curve.svg", "curve.png"]
    svg = (tmp_path / "curve.svg").read_bytes()
    assert b"</svg>" in svg
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    draw_curve(tmp_path)
    assert (tmp_path / "curve.svg").read_bytes() == svg


def test_a_run_without_evaluation_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    append_log(tmp_path, {"step": 1, "loss": 1.0})
    append_log(tmp_path, {"step": 1, "evaluation": {}})
    assert len(draw_curve(tmp_path)) == 2


def test_rows_that_no_run_writes_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    write_log(tmp_path)
    append_log(tmp_path, {"step": "x", "loss": 1.0})
    append_log(tmp_path, {"step": 40, "evaluation": {"tau_mean": "$\\frac{"}})
    append_log(tmp_path, {"step": 40, "evaluation": {}})
    assert len(draw_curve(tmp_path)) == 2
    assert len([record for record in caplog.records if "left out" in record.message]) == 2


def test_without_matplotlib_one_line_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_log(tmp_path)
    with caplog.at_level(logging.INFO):
        assert draw_curve(tmp_path) == []
    assert [record.message for record in caplog.records if "matplotlib" in record.message] != []
    assert not (tmp_path / "curve.svg").exists()
