"""The real command on the real default model, as a user would run it."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPT = "Why is the sky blue?"
LIST = "red, green, blue, " * 4  # continued without a chat template, it repeats itself: prompt lookup must gain
LIMIT = ["--max-new-tokens", "16"]
MINUTES = 10 * 60


def blockpilot(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blockpilot", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=MINUTES, **options)


def generate(*words: str, **options: Any) -> dict[str, Any]:
    done = blockpilot("generate", *words, *LIMIT, "--json", **options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module", autouse=True)
def _default_model() -> None:
    """Everything below needs the model; without it and without network there is nothing to test."""
    done = blockpilot("models", "fetch", "smollm2-135m")
    if done.returncode == 1:
        pytest.skip(f"the default model cannot be fetched: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plain(_default_model: None) -> dict[str, Any]:
    return generate(PROMPT, "--pilot", "ar", "--drafter", "none")


def test_the_default_pair_gives_the_plain_answer_in_fewer_steps(plain):
    drafted = generate(PROMPT)
    assert (drafted["text"], drafted["token_ids"]) == (plain["text"], plain["token_ids"])
    assert (drafted["pilot"], drafted["drafter"]) == ("auto", "smollm2-135m-dflash2")
    assert drafted["num_steps"] < plain["num_steps"]
    assert drafted["num_tokens"] == 1 + sum(drafted["emitted"])


def test_counts_add_up(plain):
    assert plain["num_tokens"] == 1 + sum(plain["emitted"]) == len(plain["token_ids"])
    assert plain["num_steps"] == len(plain["block_sizes"]) == len(plain["verify_sizes"]) == len(plain["emitted"])
    assert (plain["pilot"], plain["drafter"], plain["tau"]) == ("ar", None, 1.0)
    assert (plain["device"], plain["dtype"], plain["exact"]) == ("cpu", "int8", True)
    assert plain["text"]


def test_two_runs_are_equal(plain):
    again = generate("-", "--pilot", "ar", "--drafter", "none", input=PROMPT + "\n")
    assert (again["text"], again["token_ids"]) == (plain["text"], plain["token_ids"])


@pytest.fixture(scope="module")
def plain_list(_default_model: None) -> dict[str, Any]:
    return generate(LIST, "--raw", "--pilot", "ar")


@pytest.mark.parametrize("pilot", ["fixed:8", "tree:7"])
def test_drafting_changes_nothing_but_the_steps(plain_list, pilot):
    drafted = generate(LIST, "--raw", "--drafter", "ngram", "--pilot", pilot)
    assert (drafted["text"], drafted["token_ids"]) == (plain_list["text"], plain_list["token_ids"])
    assert (drafted["pilot"], drafted["drafter"]) == (pilot, "ngram")
    assert drafted["num_steps"] < plain_list["num_steps"]


def test_sampling_depends_on_the_seed_and_not_on_the_drafter():
    words = [PROMPT, "--temperature", "0.8", "--seed", "3"]
    plain = generate(*words)
    assert generate(*words, "--drafter", "ngram")["token_ids"] == plain["token_ids"]
    assert generate(PROMPT, "--temperature", "0.8", "--seed", "4")["token_ids"] != plain["token_ids"]


def test_human_mode_streams_the_same_text(plain):
    done = blockpilot("generate", PROMPT, *LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == plain["text"].rstrip("\n")
    assert "tokens/s" in done.stderr


def test_where_kernels_are_not_float32_serves_and_promises_nothing():
    found = generate(PROMPT, "--pilot", "ar", "--drafter", "none", env=os.environ | {"BLOCKPILOT_CPU": "none"})
    assert (found["dtype"], found["exact"]) == ("float32", False) and found["text"]


def test_interrupt_ends_cleanly():
    """Of an answer that takes seconds on any machine."""
    words = ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "--raw", "--pilot", "ar", "--max-new-tokens", "2000"]
    command = [sys.executable, "-m", "blockpilot", "generate", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=MINUTES)
    assert process.returncode == 130
    assert rest.endswith(b"\n")
    assert error.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in error


def test_bench_and_report(tmp_path):
    out = tmp_path / "run"
    words = ["--tasks", "mt_bench", "--num-prompts", "1", "--methods", "dflash:4,ngram", "--max-new-tokens", "12"]
    done = blockpilot("bench", *words, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["method"] for row in rows] == ["ar", "dflash:4", "ngram"]
    assert all(row["mismatches"] == 0 and row["num_tokens"] == rows[0]["num_tokens"] for row in rows)
    assert blockpilot("report", str(out)).returncode == 0
    assert "MT-Bench" in (out / "report.html").read_text(encoding="utf-8")
