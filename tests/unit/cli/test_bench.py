"""`blockpilot bench` and `blockpilot report` from the command line."""

import json
from pathlib import Path

import pytest

from blockpilot.bench.measuring import Asker
from blockpilot.cli.main import main
from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    save_dflash(make_dflash(is_second=True), folder / "drafter")
    lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}"}) for place in range(6)]
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def words(folder: Path, out: Path, *more: str) -> list[str]:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    work = ["--prompts", str(folder / "quiz.jsonl"), "--max-new-tokens", "8", "--num-prompts", "2", "--out", str(out)]
    return ["bench", *models, *work, *([] if "--methods" in more else ["--methods", "dflash:3,ngram"]), *more]


def test_from_prompts_to_a_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, tmp_path, "--json")) == 0
    spoken = capsys.readouterr()
    found = json.loads(spoken.out)
    assert [row["method"] for row in found["rows"]] == ["ar", "dflash:3", "ngram"]
    assert {row["task"] for row in found["rows"]} == {"quiz"} and found["manifest"]["is_complete"]
    assert found["manifest"]["drafters"]["dflash"]["sha256"] and "6 of 6 answers: quiz, " in spoken.err
    assert str(folder) not in json.dumps(found["manifest"])
    assert main(words(folder, tmp_path)) == 0  # nothing is measured again
    table = capsys.readouterr().out
    assert "speedup  tau" in table and "dflash:3" in table and "0 mismatches, 0 near-ties" in table
    assert main(words(folder, tmp_path, "--seed", "4")) == 2
    assert "belongs to another run: arguments.seed is 0 there and 4 here" in capsys.readouterr().err
    more = ["--concurrency", "2", "--token-budget", "3", "--reference", str(tmp_path), "--json"]
    assert main(words(folder, tmp_path / "two", *more)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["manifest"]["reference"]["folder"] == tmp_path.name
    assert found["manifest"]["arguments"]["token_budget"] == 3
    assert main(["report", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)
    assert Path(files["html"]) == tmp_path / "report.html" and "dflash:3" in (tmp_path / "report.md").read_text()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "there")]) == 0
    assert str(tmp_path / "there" / "report.html") in capsys.readouterr().out


def test_the_plan_is_shown_without_loading_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "gsm8k (1), math500 (1), humaneval (1), mt_bench (1)" in shown
    assert "ar, ngram, eagle3, dflash:4, dflash:16, auto" in shown and "30 with up to 1,440 tokens" in shown
    assert main(["bench", "--quick", "--dry-run", "--num-prompts", "2", "--methods", "best-fixed", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["plan"]["methods"] == ["ar", "best-fixed"] and plan["plan"]["max_new_tokens"] == 48
    assert plan["num_answers"] == 2 * 2 * 5 + 2 * 17 * 5


def test_the_papers_method_is_left_out_by_default_where_it_was_not_trained(
    model_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--tasks", "gsm8k", "--dry-run"]) == 0
    spoken = capsys.readouterr()
    assert (
        "left out: method blockpilot needs a trained pilot" in spoken.err and "train-pilot --kind prefill" in spoken.err
    )
    assert "blockpilot" not in spoken.out and "chain-step, auto" in spoken.out


@pytest.mark.parametrize("more", [[], ["--quick"]])
def test_eagle3_is_left_out_by_default_where_none_ships(
    folder: Path, model_cache: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    models = ["--target", "org/model", "--drafter", str(folder / "drafter"), "--tasks", "gsm8k"]
    assert main(["bench", *models, "--dry-run", *more]) == 0
    spoken = capsys.readouterr()
    names = "eagle3" if more else "eagle3, eagle3-tree"
    assert f"left out: {names}: no EAGLE-3 drafter ships for org/model" in spoken.err
    assert "eagle3" not in spoken.out and "dflash:16" in spoken.out
    assert main(["bench", *models, "--dry-run", "--eagle3", "folder", *more]) == 0
    spoken = capsys.readouterr()
    assert "EAGLE-3" not in spoken.err and names in spoken.out


def test_a_dry_run_looks_at_the_device_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, line in (("tpu", "unknown device 'tpu': use cpu or cuda"), ("cuda", "PyTorch sees no GPU here")):
        assert main(["bench", "--quick", "--dry-run", "--device", device]) == 2
        spoken = capsys.readouterr()
        assert spoken.out == "" and line in spoken.err and spoken.err.count("\n") == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["bench", "--quick", "--dry-run", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] < 10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "gsm8k,chess"], "unknown task 'chess'; known: gsm8k"),
        (["--tasks", "alpaca"], "does not ship because of its licence"),
        (["--methods", "ar,fast"], "unknown method 'fast'; known: ar"),
        (["--methods", "blockpilot"], "train-pilot --kind prefill"),
        (["--methods", "eagle3"], "method 'eagle3' needs an EAGLE-3 drafter"),
        (["--methods", "ar,,ngram"], "--methods 'ar,,ngram': give names separated by commas"),
        (["--num-prompts", "-1"], "--num-prompts must be at least 0"),
        (["--token-budget", "0"], "--token-budget must be at least 1"),
        (["--reference", "nowhere"], "--reference nowhere holds no benchmark run: give the --out of one"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--methods", "best-fixed", "--split", "all"], "measured on --split test alone"),
        (["--prompts", "nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, tmp_path: Path, model_cache: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(words(folder, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.count("\n") == 0


def test_bad_lines_are_named_or_skipped(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"prompt": 1}\n{"prompt": "b"}\n', encoding="utf-8")
    command = ["bench", "--prompts", str(bad), "--split", "all", "--methods", "ar", "--dry-run"]
    assert main(command) == 2
    assert "bad.jsonl, line 2: no prompt found" in capsys.readouterr().err
    assert main([*command, "--skip-bad"]) == 0
    spoken = capsys.readouterr()
    assert "left out: " in spoken.err and "bad (2)" in spoken.out


def test_ctrl_c_says_how_to_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Asker, "ask", stop)
    assert main(words(folder, tmp_path)) == 130
    assert f"the same command with --out {tmp_path} goes on" in " ".join(capsys.readouterr().err.split())


def test_report_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "rows.jsonl cannot be read" in capsys.readouterr().err
