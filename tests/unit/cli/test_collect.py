"""`blockpilot collect` from files on disk to traces that a pilot can run on."""

import json
import sys
from pathlib import Path

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.cli.main import main
from blockpilot.core.files import hash_file
from blockpilot.engine.llm import LLM
from blockpilot.models.dflash_format import save_dflash
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay.simulate import simulate
from blockpilot.replay.trace_files import TraceSet
from blockpilot.text.prompts import read_prompts
from tests.tiny import make_dflash
from tests.unit.replay.pieces import shapes
from tests.unit.training.pieces import save_target

SMALL = ["--sizes", "2-4,8", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    save_dflash(make_dflash(is_second=True), folder / "drafter")
    lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}"}) for place in range(12)]
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "more.txt").write_text("one\ntwo\n", encoding="utf-8")
    return folder


def words(folder: Path, out: Path, *more: str) -> list[str]:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return ["collect", "--prompts", str(folder / "quiz.jsonl"), "--out", str(out), *models, *SMALL, *more]


def test_traces_of_a_split_walk_like_generate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prompts", str(folder / "more.txt"), "--split", "test", "--num-prompts", "2", "--temperature", "1"]
    assert main(words(folder, tmp_path, *more, "--seed", "5", "--json")) == 0
    spoken = capsys.readouterr()
    found = json.loads(spoken.out)
    assert "traces (" in spoken.err and "left): 4 of 4" in spoken.err
    traces = TraceSet(tmp_path)
    assert found == {
        "out": str(tmp_path),
        "num_traces": 4,
        "num_shards": 1,
        "num_answer_tokens": sum(len(trace.answer_ids) for trace in traces),
        "num_disagreements": 0,
        "is_estimate": False,
    }
    manifest = traces.manifest
    assert manifest["drafter_sha256"] == hash_file(folder / "drafter" / "model.safetensors")
    assert [file["name"] for file in manifest["prompt_files"]] == ["quiz.jsonl", "more.txt"]
    assert manifest["draft_sizes"] == [4, 8] and manifest["device"] == "cpu" and manifest["dtype"] == "float32"
    quiz = [prompt for prompt in read_prompts(folder / "quiz.jsonl") if not prompt.is_calibration]
    assert [(trace.task, trace.prompt_id) for trace in traces][:2] == [("quiz", prompt.id) for prompt in quiz[:2]]
    llm = LLM(str(folder / "target"), drafter=str(folder / "drafter"))
    for trace, prompt in zip(traces, quiz[:2], strict=False):
        assert trace.seed == 5 + int(prompt.id[1:])
        params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=trace.seed)
        online = llm.generate(prompt.text, params, pilot="fixed:8")
        assert shapes(simulate(trace, FixedPilot(8))) == shapes(online.steps)


def test_a_finished_run_has_nothing_to_do_and_another_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = words(folder, tmp_path, "--num-prompts", "2", "--anchors", "visited")
    assert main(few) == 0
    assert "2 traces with" in capsys.readouterr().out
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert main(few) == 0
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == before
    capsys.readouterr()
    assert main([*few, "--split", "test"]) == 2
    assert "split is 'all' there and 'test' here; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--sizes", "2-x"], "--sizes '2-x': give block sizes up to 64 and ranges of them separated by commas"),
        (["--sizes", "8-2"], "--sizes '8-2': give block sizes"),
        (["--sizes", "1-4"], "block size 1: sizes lie between 2 and 64"),
        (["--draft-sizes", "5"], "draft size 5 is not among the sizes 2, 3, 4, 8"),
        (["--draft-sizes", "4", "--anchors", "visited"], "candidates are kept at every anchor or not at all"),
        (["--anchors", "some"], "unknown anchors 'some'"),
        (["--candidates", "0"], "candidates must lie between 1 and 254"),
        (["--precision", "int3"], "unknown precision 'int3'"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--num-prompts", "-1"], "--num-prompts must be at least 0"),
        (["--shard-size", "0"], "--shard-size must be at least 1"),
        (["--prompts", "gone.txt"], "prompt file gone.txt does not exist"),
        (["--split", "train"], "invalid choice: 'train'"),
        (["--drafter", "ngram"], "replay needs a DFlash drafter, got ngram"),
        (["--drafter", "auto"], "replay needs a DFlash drafter, and none ships for"),
    ],
)
def test_bad_arguments_are_one_line(
    folder: Path, tmp_path: Path, more: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folder, tmp_path / "out", *more)) == 2
    spoken = capsys.readouterr()
    assert spoken.out == "" and not (tmp_path / "out").exists()
    assert line in spoken.err and spoken.err.count("\n") == 1


def test_cuda_without_a_gpu(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(words(folder, tmp_path, "--device", "cuda")) == 2
    assert "PyTorch sees no GPU here: use the device cpu" in capsys.readouterr().err


def test_options_of_ray_are_checked_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        ("--ray-workers", "2"): "give --ray as well",
        ("--ray", "--ray-workers", "0"): "--ray-workers must be at least 1, got 0",
        ("--ray", "--device", "cuda:1"): "use --device cuda, not cuda:1",
        ("--ray", "127.0.0.1:9"): "no Ray cluster at 127.0.0.1:9: ",
    }
    for more, message in wrong.items():
        assert main(words(folder, tmp_path, *more)) in (1, 2)
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert main(words(folder, tmp_path, "--ray")) == 2
    assert "--ray needs the package ray: pip install 'blockpilot[ray]'" in capsys.readouterr().err
