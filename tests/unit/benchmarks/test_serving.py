"""What is made of times over HTTP; and a whole run on a tiny target."""

import json
import sys
from pathlib import Path

import pytest
import serving
from serving_sites import Reply, read_record

from blockpilot.core.errors import BlockPilotError
from blockpilot.loadtest.records import Failure, Record
from tests.unit.training.pieces import save_target


def test_rates_are_of_what_follows_the_first_text() -> None:
    record = Record(
        number=0, prompt_id="p", planned=0, sent=10.0, ended=14.0, chunk_times=[10.5, 11, 12.5], num_tokens=9
    )
    reply = read_record(record)
    assert (reply.ttft, reply.rate) == (0.5, 4.0)
    assert Reply([0.5, 2.5], 9).rate == 4.0
    lost = Record(number=0, prompt_id="p", planned=0, sent=0, ended=1, failure=Failure("timeout"))
    with pytest.raises(BlockPilotError, match="a request failed: timeout"):
        read_record(lost)


def test_intervals_hold_the_median() -> None:
    assert serving.interval([1.0, 2.0]) is None
    low, high = serving.interval([float(value) for value in range(101)]) or (0, 0)
    assert 30 < low < 50 < high < 70


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tmp_path / "target", tmp_path / "out" / "serving.json"
    save_target(target)
    (tmp_path / "prompts.txt").write_text("what is it\nwho was that\nwhy\nwhen\n")
    words = [
        "--target",
        str(target),
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--parts",
        "engine,turns,clients,load",
    ]
    words += ["--num-prompts", "3", "--repeats", "3", "--max-new-tokens", "8", "--history", "30", "--slots", "2"]
    words += ["--rates", "50", "--num-requests", "4", "--json", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["serving.py", *words])
    assert serving.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text())
    assert [row["pilot"] for row in result["engine"]] == ["ar", "auto"]
    assert all(row["num_prompts"] == 3 and row["overhead_interval"] for row in result["engine"])
    assert result["turns"][0]["num_chats"] == 3 and result["turns"][0]["ratio"] > 0
    assert [row["num_rounds"] for row in result["clients"]] == [3, 3] and result["clients"][0]["ratio"] > 0
    assert result["load"][0]["num_ok"] == 4 and result["manifest"]["versions"]["blockpilot"]
