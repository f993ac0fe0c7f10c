"""Long verbs are told to stop in the middle of their work: one line, the right exit code, and then they go on.

Models are tiny, and lie in folders. The first run is a process of its own; the one that goes on is this process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from blockpilot.cli.main import main
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash_format import save_dflash
from blockpilot.models.weights import save_decoder_folder
from tests.tiny import CONFIGS, make_decoder, make_dflash
from tests.unit.training.pieces import chat_tokenizer, save_target

pytestmark = pytest.mark.slow

SECONDS = 120
NUM_PROMPTS = 40
SHAPE = ["--layers", "1", "--block-size", "4", "--taps", "0,2", "--blocks", "4", "--batch-size", "4", "--width", "48"]
Begun = Callable[[], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of models, a target that answers for long, prompts, training text and traces."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    save_dflash(make_dflash(is_second=True), folder / "drafter")
    endless = Decoder(replace(CONFIGS["llama"], context_length=2**14, eos_token_ids=()))
    endless.load_state_dict(make_decoder().state_dict())
    save_decoder_folder(endless, folder / "endless")
    chat_tokenizer().save(folder / "endless")
    lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}"}) for place in range(NUM_PROMPTS)]
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for verb, *words in (synthesize(folder, 24, 8), collect(folder, 8)):
        assert main([verb, *words, "--out", str(folder / verb)]) == 0
    return folder


def synthesize(folder: Path, num_prompts: int, shard_size: int) -> list[str]:
    words = ["--num-prompts", str(num_prompts), "--max-length", "48", "--temperatures", "0", "--rows", "8"]
    return ["synthesize", "--target", str(folder / "target"), *words, "--shard-size", str(shard_size)]


def collect(folder: Path, shard_size: int) -> list[str]:
    words = ["--sizes", "2-4", "--draft-sizes", "4", "--max-new-tokens", "16", "--shard-size", str(shard_size)]
    return ["collect", *pair(folder), *words]


def pair(folder: Path) -> list[str]:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return [*models, "--prompts", str(folder / "quiz.jsonl")]


def train_drafter(folder: Path) -> list[str]:
    models = ["--target", str(folder / "target"), "--data", str(folder / "synthesize")]
    return ["train-drafter", *models, *SHAPE, "--steps", "60", "--checkpoint-every", "5"]


def train_pilot(folder: Path) -> list[str]:
    network = ["--kind", "prefill", "--sizes", "2,3", "--hidden-size", "8", "--epochs", "400"]
    return ["train-pilot", "--traces", str(folder / "collect"), *network]


def bench(folder: Path) -> list[str]:
    return ["bench", *pair(folder), "--methods", "dflash:3,ngram", "--max-new-tokens", "16"]


def start(words: list[str], stderr: Path) -> "subprocess.Popen[bytes]":
    with stderr.open("wb") as file:
        command = [sys.executable, "-m", "blockpilot", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as in tests: a benchmark goes on with as many threads
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment)


def stop_when(process: "subprocess.Popen[bytes]", begun: Begun) -> None:
    """Let it stand still, in the middle of its work."""
    deadline = time.monotonic() + SECONDS
    while not begun():
        assert process.poll() is None and time.monotonic() < deadline, "it has ended, or never begun"
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)


def end(process: "subprocess.Popen[bytes]", number: int) -> int:
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=SECONDS)
    return process.returncode


def is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


@pytest.mark.parametrize(
    ("verb", "sign", "said"),
    [
        ("synthesize", "shard-00000.safetensors", "terminated"),
        ("train-drafter", "checkpoint.pt", "blockpilot: error: stopped; step "),
        ("collect", "shard-00000.safetensors", "terminated"),
        ("train-pilot", "", "terminated"),
        ("bench", "answers.jsonl", "terminated"),
    ],
)
def test_a_verb_that_was_terminated_goes_on(
    folder: Path, tmp_path: Path, verb: str, sign: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "synthesize": synthesize(folder, 100, 2),
        "train-drafter": train_drafter(folder),
        "collect": collect(folder, 1),
        "train-pilot": train_pilot(folder),
        "bench": bench(folder),
    }[verb]
    out, stderr = tmp_path / "out", tmp_path / "stderr"
    words = [*words, "--out", str(out)]
    process = start(words, stderr)
    stop_when(process, lambda: is_filled(out / sign) if sign else b"epochs" in stderr.read_bytes())
    assert end(process, signal.SIGTERM) == 143
    spoken = stderr.read_text().splitlines()
    assert spoken[-1].startswith(said) and not any("Traceback" in line for line in spoken)
    hidden = [path.name for path in out.glob(".*")] if out.exists() else []
    kept = (out / sign).stat().st_ino if sign.startswith("shard") else None
    assert hidden == [] and main(words) == 0
    assert kept in (None, (out / sign).stat().st_ino)
    capsys.readouterr()


def test_an_answer_that_was_terminated_ends_its_line(folder: Path, tmp_path: Path) -> None:
    words = ["generate", "what is it", "--target", str(folder / "endless"), "--pilot", "ar", "--drafter", "none"]
    process = start([*words, "--max-new-tokens", "16000"], tmp_path / "stderr")
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143 and rest.endswith(b"\n")
    assert (tmp_path / "stderr").read_text().splitlines()[-1] == "terminated"
    assert main([*words, "--max-new-tokens", "16"]) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_process_is_told_who_is_at_work(
    folder: Path, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*collect(folder, 1), "--out", str(out)]
    process = start(words, tmp_path / "stderr")
    stop_when(process, lambda: is_filled(out / "shard-00000.safetensors"))
    before = sorted(os.listdir(out))
    assert main(words) == 2
    line = capsys.readouterr().err
    assert f"{out} is in use by blockpilot collect (process {process.pid} on " in line and line.count("\n") == 1
    assert sorted(os.listdir(out)) == before
    assert end(process, number) == (143 if number == signal.SIGTERM else -9)
    assert main(words) == 0
    assert sorted(path.suffix for path in out.iterdir()) == [".json", *[".safetensors"] * NUM_PROMPTS]
