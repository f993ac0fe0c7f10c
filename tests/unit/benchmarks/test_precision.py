"""Distances between precisions: equal tokens, divergence, gaps of scores; and a whole run on a tiny target."""

import json
import sys
from pathlib import Path

import precision
import pytest
import torch

from tests.unit.training.pieces import save_target


def test_equal_logits_are_no_distance_apart_and_a_shift_of_all_changes_nothing() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    same, divergence, gap = precision.compare(logits + 3.0, logits)
    assert same.tolist() == [1.0] * 5 and gap.tolist() == [0.0] * 5
    assert divergence.abs().max() < 1e-6


def test_divergence_is_in_nats_and_the_gap_is_in_scores_of_float32() -> None:
    expected = torch.tensor([[0.5, 0.25, 0.25]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25]]).log()
    same, divergence, gap = precision.compare(other, expected)
    assert same.item() == 0.0
    assert divergence.item() == pytest.approx(0.25 * 0.6931472)
    assert gap.item() == pytest.approx(0.6931472)


def test_rows_hold_means_over_all_positions_and_shares_of_right_answers() -> None:
    parts = [torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.1, 0.2], [0.0, 0.0, 0.4]], dtype=torch.float64), torch.ones(3, 1)]
    row = precision.build_row("int8", [part.double() for part in parts], [True, False])
    assert row["num_positions"] == 4 and row["same_next"] == 0.75 and row["score"] == 0.5
    assert row["divergence"] == pytest.approx(1.3 / 4) and row["largest_gap"] == 1.0
    itself = precision.build_row("float32", (), [])
    assert itself["num_positions"] == itself["num_scored"] == 0 and itself["same_next"] is itself["score"] is None


def test_a_precision_is_compared_on_text_of_float32_and_missing_llama_cpp_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    save_target(tmp_path / "target")
    lines = [json.dumps({"id": name, "turns": [f"what is {name}"], "answer": "4"}) for name in ("q0", "q1")]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["--target", str(tmp_path / "target"), "--data", str(tmp_path), "--tasks", "gsm8k", "--threads", "1"]
    out = tmp_path / "found.json"
    monkeypatch.setattr(precision, "MAX_TREE_NODES", 8)  # answers are longer than one chain
    sizes = ["--num-prompts", "2", "--max-new-tokens", "20"]
    assert precision.main([*words, *sizes, "--dtypes", "bfloat16", "--scores", "--out", str(out)]) == 0
    spoken, found = capsys.readouterr(), json.loads(out.read_text(encoding="utf-8"))
    assert "skipped llama.cpp: the package llama-cpp-python is missing" in spoken.err and "bfloat16" in spoken.out
    exact, rounded = found["rows"]
    assert exact["precision"] == "float32" and exact["num_scored"] == rounded["num_scored"] == 2
    assert rounded["num_positions"] > 8 and 0 < rounded["divergence"] < 0.1 and rounded["same_next"] > 0.5
    assert found["prompts"]["gsm8k"]["num_prompts"] == 2
    assert precision.main([*words, "--dtypes", "int3"]) == 2
    assert "unknown dtype 'int3'" in capsys.readouterr().err
