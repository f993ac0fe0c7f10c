"""Simulated and measured throughput of a tiny pair: the same steps, and rows that say where times differ."""

import json
from pathlib import Path

import pytest
import simulated_speed

from blockpilot.models.dflash_format import save_dflash
from blockpilot.pilots.cost_model import StepCosts
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target

METHODS = ("ar", "dflash:4", "tree:6", "chain-step")


@pytest.fixture
def words(tmp_path: Path, model_cache: Path) -> list[str]:
    save_target(tmp_path / "target")
    save_dflash(make_dflash(is_second=True), tmp_path / "drafter")
    for task in ("gsm8k_test", "humaneval"):
        lines = [json.dumps({"id": name, "turns": [f"what is {name}", "again"]}) for name in ("q0", "q1")]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    models = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--contexts", "20"]
    return [*models, "--data", str(tmp_path), "--max-new-tokens", "12", "--quick-profile"]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulated_speed", *words])
    simulated_speed.main()


def test_every_method_takes_the_same_steps_both_ways(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run([*words, "--methods", ",".join(METHODS), "--out", str(out)], monkeypatch)
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*METHODS, "ratio", "costs after decoding over those before: draft "))
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [(row["task"], row["method"]) for row in rows] == [
        (task, method) for task in ("gsm8k", "humaneval", "mean") for method in METHODS
    ]
    costs = StepCosts.from_dict(json.loads((out / "profile.json").read_text()))
    for row in rows:
        assert row["same_answer"] == 1 and row["same_steps"] == 1
        assert row["measured_tau"] == pytest.approx(row["simulated_tau"])
        assert sum(row["simulated_ms"].values()) == pytest.approx(row["simulated_step_ms"])
        assert row["ratio_ci"][0] <= row["ratio"] <= row["ratio_ci"][1]
        if row["task"] != "mean":
            rates = [1e3 * row[f"{side}_tau"] / row[f"{side}_step_ms"] for side in ("measured", "simulated")]
            assert rates[0] == pytest.approx(row["measured_tokens_per_second"])
            assert rates[1] == pytest.approx(row["simulated_tokens_per_second"])
            assert row["ratio"] == pytest.approx(rates[1] / rates[0])
    plain = rows[0]
    assert plain["simulated_step_ms"] == pytest.approx(costs.verify_ms(1)) and plain["simulated_speedup"] == 1
    assert json.loads((out / "manifest.json").read_text())["is_complete"]
    with pytest.raises(SystemExit, match="is not empty"):
        run([*words, "--out", str(out)], monkeypatch)


def test_what_replay_cannot_repeat_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("ngram", "eagle3", "best-fixed"):
        with pytest.raises(SystemExit, match=f"method '{method}' cannot be simulated"):
            run([*words, "--methods", method], monkeypatch)
