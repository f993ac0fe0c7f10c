"""`synthesize` and `train-drafter` from a folder on disk to a drafter that decodes."""

import json
from pathlib import Path

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.cli.main import main
from blockpilot.core.errors import BlockPilotError
from blockpilot.training import setup
from tests.unit.training.pieces import save_target

SHAPE = ["--layers", "1", "--block-size", "4", "--taps", "0,2", "--unrolled", "3", "--blocks", "4"]
SMALL = [*SHAPE, "--steps", "4", "--batch-size", "4", "--width", "64"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    out = tmp_path_factory.mktemp("data")
    words = ["--num-prompts", "40", "--max-length", "64", "--rows", "8", "--temperatures", "0"]
    assert main(["synthesize", "--target", str(target), "--out", str(out), *words]) == 0
    return out


def train(target: Path, data: Path, out: Path, *words: str) -> int:
    return main(["train-drafter", "--target", str(target), "--data", str(data), "--out", str(out), *SMALL, *words])


def test_synthesize_says_what_it_wrote(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["synthesize", "--target", str(target), "--out", str(tmp_path), "--num-prompts", "16", "--max-length", "64"]
    assert main(words) == 0
    spoken = capsys.readouterr()
    assert "texts with" in spoken.out
    assert "answers of shard 0" in spoken.err and "tokens/s" in spoken.err
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["out"] == str(tmp_path) and found["num_shards"] == 1 and found["num_texts"] > 0


def test_synthesize_shows_its_mix(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [{"name": "talk", "prompts": ["what is a?", "what is b?"], "tokens": 16, "then": ["and c?"]}]
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    words = ["synthesize", "--target", str(target), "--out", str(tmp_path / "data"), "--num-prompts", "0"]
    words += ["--tasks", "8", "--templates", str(tmp_path / "tasks.json"), "--max-length", "64"]
    assert main(words) == 0
    spoken = capsys.readouterr()
    assert "mean answer" in spoken.out and "talk" in spoken.out and "warning" not in spoken.err
    assert main([*words, "--json"]) == 0
    mix = json.loads(capsys.readouterr().out)["mix"]
    assert [(row["source"], row["prompts"]) for row in mix] == [("files", 0), ("written", 0), ("talk", 8)]
    assert train(target, tmp_path / "data", tmp_path / "run", "--max-width", "96") == 0


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "eagle3"])
def test_a_trained_drafter_decodes(
    target: Path, data: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, data, tmp_path, "--kind", kind, "--json") == 0
    spoken = capsys.readouterr()
    found = json.loads(spoken.out)
    assert found["steps"] == 4 and found["agreement"] > 0.9 and found["evaluation"]["tau_mean"] >= 1
    assert "step 4: loss" in spoken.err and "step 4: held-out" in spoken.err
    assert (tmp_path / "curve.svg").is_file()
    params = SamplingParams(max_new_tokens=20)
    plain, drafted = (LLM(str(target), drafter=name) for name in (None, found["drafter"]))
    expected = plain.generate("what is it", params, pilot="ar")
    assert drafted.generate("what is it", params, pilot="fixed:4").token_ids == expected.token_ids


def test_a_finished_run_has_nothing_to_do(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, data, tmp_path) == 0
    before = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert train(target, data, tmp_path, "--checkpoint-every", "7") == 0
    assert f"the drafter is in {tmp_path / 'drafter'}" in capsys.readouterr().out
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == before
    assert train(target, data, tmp_path, "--seed", "3") == 2
    assert "run.seed is 0 there and 3 here; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "words", "line"),
    [
        ("synthesize", ["--num-prompts", "0"], "nothing to answer: give --num-prompts, --tasks or --prompts FILE"),
        ("synthesize", ["--templates", "gone.json"], "--templates without a number of prompts to make of them"),
        ("synthesize", ["--templates", "gone.json", "--tasks", "4"], "task templates gone.json do not exist"),
        ("synthesize", ["--answers", "0"], "--answers must be at least 1"),
        ("synthesize", ["--tasks", "-1"], "--tasks must be at least 0"),
        ("synthesize", ["--max-answer", "7"], "--max-answer must be at least 8"),
        ("train-drafter", ["--max-width", "32"], "--max-width must be at least --width 448, got 32"),
        ("synthesize", ["--num-prompts", "-1"], "--num-prompts must be at least 0"),
        ("synthesize", ["--temperatures", "0,hot"], "give numbers separated by commas"),
        ("synthesize", ["--temperatures", "11"], "temperatures lie between 0 and 10"),
        ("synthesize", ["--max-length", "8"], "--max-length must be at least 32"),
        ("synthesize", ["--rows", "-1"], "--rows must be at least 0"),
        ("synthesize", ["--prompts", "gone.txt"], "prompt file gone.txt does not exist"),
        ("synthesize", ["--device", "toaster"], "unknown device 'toaster'"),
        ("synthesize", ["--device", "mps"], "unknown device 'mps': use cpu or cuda"),
        ("synthesize", ["--dtype", "int3"], "unknown dtype 'int3'"),
        ("train-drafter", ["--layers", "0"], "--layers must be at least 1"),
        ("train-drafter", ["--taps", "a,b"], "--taps 'a,b': give a count, or layer numbers"),
        ("train-drafter", ["--taps", "0"], "--taps must lie between 1 and 64"),
        ("train-drafter", ["--kind", "medusa"], "invalid choice: 'medusa'"),
        ("train-drafter", ["--optimizer", "muon"], "the muon optimizer needs a GPU"),
        ("train-drafter", ["--data", "gone"], "gone holds no training text"),
        ("train-drafter", ["--start-from", "gone"], "gone"),
    ],
)
def test_bad_arguments_are_one_line(
    target: Path, data: Path, tmp_path: Path, verb: str, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", str(target), "--out", str(tmp_path)] + (["--data", str(data)] if verb != "synthesize" else [])
    capsys.readouterr()
    assert main([verb, *given, *words]) == 2
    spoken = capsys.readouterr()
    assert spoken.out == ""
    assert line in spoken.err and spoken.err.count("\n") == 1


def test_cuda_without_a_gpu(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["synthesize", "--target", str(target), "--out", str(tmp_path), "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU here: use the device cpu" in capsys.readouterr().err


def test_a_stop_has_the_exit_code_of_its_signal(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: setup.Trainer, report: object) -> None:
        error = BlockPilotError("stopped; give the same command again")
        error.exit_code = 143
        raise error

    monkeypatch.setattr(setup.Trainer, "run", run)
    assert train(target, data, tmp_path) == 143
    assert capsys.readouterr().err.endswith("blockpilot: error: stopped; give the same command again\n")
