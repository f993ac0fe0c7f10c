"""Peers on a tiny pair: what is compared, what is skipped, how differences are told."""

import json
import sys
from pathlib import Path

import peers
import pytest

from blockpilot.bench.audit import Difference
from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash
from tests.unit.bench.pieces import make_answer
from tests.unit.training.pieces import save_target


@pytest.fixture
def pair(tmp_path: Path, model_cache: Path) -> list[str]:
    """A saved pair and prompts of a known task: two for the test, one for calibration (c3)."""
    save_target(tmp_path / "target")
    save_dflash(make_dflash(is_second=True), tmp_path / "drafter")
    lines = [json.dumps({"id": name, "turns": [f"what is {name}", "again"]}) for name in ("q0", "q1", "c3")]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    models = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    return [*models, "--data", str(tmp_path), "--tasks", "gsm8k", "--max-new-tokens", "12", "--threads", "1"]


def test_every_engine_answers_every_prompt_and_a_missing_one_is_named(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    out = tmp_path / "out"
    assert peers.main([*pair, "--out", str(out)]) == 0
    spoken = capsys.readouterr()
    missing = {"llama.cpp", "llama.cpp-lookup", "llama.cpp-q4_0"}
    for name in missing:
        assert f"skipped {name}: the package llama-cpp-python is missing: pip install" in spoken.err
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ["ar", "best-fixed", "auto", "transformers", "transformers-lookup"]
    assert [row["method"] for row in rows] == names
    assert all(row["num_prompts"] == 2 and row["equal_share"] == 1.0 and row["ratio"] > 0 for row in rows)
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 2 * len(names) and (out / "differences.jsonl").read_text(encoding="utf-8") == ""
    assert len({tuple(a["token_ids"]) for a in answers if a["prompt_id"] == "q0"}) == 1
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["contestants"].keys() == set(names) and manifest["skipped"].keys() == missing
    assert manifest["near_tie_gap"] == 1e-4 and "over llama.cpp" not in spoken.out
    assert all(name in spoken.out for name in names)
    assert peers.main([*pair, "--out", str(out)]) == 2
    assert "is not empty: choose another --out" in capsys.readouterr().err


def test_gpu_peers_keep_one_static_cache_a_failing_one_is_skipped_and_time_runs_out(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> peers.Reply:
        raise RuntimeError("no compiler")

    build = peers.Peers.build

    def build_one_that_fails(self: peers.Peers, name: str) -> peers.Contestant:
        contestant = build(self, name)
        if name == "transformers-compile":
            monkeypatch.setattr(contestant, "answer", fail)
        return contestant

    monkeypatch.setattr(peers.Peers, "build", build_one_that_fails)
    out = tmp_path / "out"
    chosen = ["--peers", "transformers-static,transformers-compile,dflash", "--num-prompts", "2"]
    assert peers.main([*pair, *chosen, "--out", str(out)]) == 0
    assert "skipped transformers-compile: RuntimeError: no compiler" in capsys.readouterr().err
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["method"] for row in rows] == ["ar", "best-fixed", "auto", "transformers-static"]
    assert all(row["num_prompts"] == 2 and row["equal_share"] == 1.0 for row in rows)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["skipped"].keys() == {"transformers-compile", "dflash"} and manifest["is_complete"]
    short = tmp_path / "short"
    hurried = ["--peers", "transformers-static", "--seconds", "0", "--prefill", "5,40"]
    assert peers.main([*pair, *hurried, "--out", str(short)]) == 0
    spoken = capsys.readouterr()
    assert "out of time after 1 of 2 rounds" in spoken.err and "read in" in spoken.out
    rows = [json.loads(line) for line in (short / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["num_prompts"] == 1 for row in rows if row["task"] == "gsm8k")
    read = [(row["task"], row["method"], len(row["seconds"])) for row in rows if row["task"] != "gsm8k"]
    assert read == [(f"prefill:{size}", name, peers.PREFILL_REPEATS) for size in (5, 40) for name in ("ar", "auto")]
    assert not json.loads((short / "manifest.json").read_text(encoding="utf-8"))["is_complete"]


def test_rows_hold_ratio_share_of_equal_texts_and_the_first_difference() -> None:
    def answers(task: str) -> list:
        own = {"ar": (2.0, [4]), "other": (1.0, [4])}
        return [
            make_answer(emitted, method=name, seconds=seconds, task=task, prompt_id=f"q{place}", batch=place)
            for name, (seconds, emitted) in own.items()
            for place in range(2)
        ]

    def difference(task: str, prompt_id: str, position: int) -> Difference:
        return Difference(task, "other", prompt_id, 0, 0, position, 0.02)

    odd = [difference("quiz", "q0", 3), difference("quiz", "q1", 1), difference("talk", "q0", 2)]
    rows = peers.build_rows([*answers("quiz"), *answers("talk")], odd, ["ar", "other"], "id")
    found = {(row["task"], row["method"]): row for row in rows}
    assert found["mean", "other"]["ratio"] == 2.0 and found["mean", "other"]["ratio_ci"] == [2.0, 2.0]
    assert found["mean", "other"]["tokens_per_second"] == 4.0 and found["mean", "other"]["num_prompts"] == 4
    assert found["mean", "other"]["equal_share"] == 0.25 and found["talk", "other"]["equal_share"] == 0.5
    assert found["quiz", "ar"]["equal_share"] == 1.0 and found["quiz", "ar"]["first_difference"] is None
    first = {"task": "quiz", "prompt_id": "q1", "position": 1, "gap": 0.02}
    assert found["quiz", "other"]["first_difference"] == first


def test_rows_hold_ratios_over_llama_cpp_and_the_time_of_the_first_token() -> None:
    def answers(name: str, seconds: float, tokens: list[int]) -> list:
        own = {"emitted": tokens, "method": name, "seconds": seconds, "prefill_seconds": seconds / 10}
        return [make_answer(**own, prompt_id=f"q{place}", batch=place) for place in range(3)]

    given = [*answers("ar", 2.0, [4]), *answers("auto", 0.5, [4]), *answers("llama.cpp", 1.0, [4, 1])]
    rows = {row["method"]: row for row in peers.build_rows(given, [], ["ar", "auto", "llama.cpp"], "id")}
    assert rows["auto"]["llama_ratio"] == pytest.approx(8 / 5) and rows["auto"]["ratio"] == 4.0
    assert rows["auto"]["llama_ratio_ci"] == pytest.approx([8 / 5, 8 / 5]) and rows["llama.cpp"]["llama_ratio"] == 1.0
    assert rows["ar"]["first_token_ms"] == pytest.approx(200) and rows["auto"]["first_token_ms"] == pytest.approx(50)
    assert rows["llama.cpp"]["llama_equal_share"] == 1.0 and rows["auto"]["llama_equal_share"] == 0.0
    alone = peers.build_rows(answers("ar", 2.0, [4]), [], ["ar"], "id")[0]
    assert alone["llama_ratio"] is alone["llama_ratio_ci"] is alone["llama_equal_share"] is None


def test_reading_is_timed_in_turns_and_compared_by_medians() -> None:
    lengths: list[int] = []

    class Reader:
        name, about = "ar", {}

        def answer(self, prompt_ids: list[int], max_new_tokens: int) -> peers.Reply:
            lengths.append(len(prompt_ids))
            return peers.Reply([1] * max_new_tokens, 1, 0.5, 0.0)

    found = peers.time_reading([Reader()], [[1, 2], [3]], [2, 7])
    assert found == {(2, "ar"): [0.5] * peers.PREFILL_REPEATS, (7, "ar"): [0.5] * peers.PREFILL_REPEATS}
    assert set(lengths) == {2, 7} and len(lengths) == 2 * (peers.PREFILL_REPEATS + 1)
    rows = peers.build_read_rows({(128, "ar"): [0.1, 0.2, 9.0], (128, "llama.cpp"): [0.4, 0.1, 0.5]}, "id")
    assert [row["task"] for row in rows] == ["prefill:128"] * 2 and rows[0]["milliseconds"] == 200.0
    assert rows[0]["tokens_per_second"] == 640.0 and [row["llama_ratio"] for row in rows] == [2.0, 1.0]
    assert peers.build_read_rows({(128, "ar"): [0.1]}, "id")[0]["llama_ratio"] is None


def test_prompts_to_read_must_be_numbers_that_fit(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.parse_arguments(["--prefill", "128,512"]).prefill == [128, 512]
    with pytest.raises(SystemExit):
        peers.parse_arguments(["--prefill", "0"])
    assert peers.main([*pair, "--prefill", "100000", "--out", str(tmp_path / "out")]) == 2
    assert "--prefill 100000 does not fit the context of" in capsys.readouterr().err
