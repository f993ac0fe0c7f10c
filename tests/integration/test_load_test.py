"""`blockpilot load-test` against `blockpilot serve`, over a real connection: what one sends the other answers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpilot.cli.main import main
from tests.soak.process import ServerProcess, running_server
from tests.soak.server import MAX_QUEUE, NUM_SLOTS


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as found:
        yield found


def measure(capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path, *words: str) -> Any:
    """Results of a run that ends well; requests of its first load by number, and what was said beside it."""
    out = tmp_path / "result.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"tell me about {number}\n" for number in range(50)))
    usual = ["--url", server.url, "--prompts", str(prompts), "--out", str(out), "--json"]
    assert main(["load-test", *usual, *words]) == 0
    captured = capsys.readouterr()
    kept = json.loads(out.read_text())
    requests = sorted(kept["loads"][0]["requests"], key=lambda one: one["number"])
    return json.loads(captured.out)["loads"], requests, captured.err


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_rates_and_clients(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path, endpoint: str
) -> None:
    words = ["--endpoint", endpoint, "--max-tokens", "12", "--ignore-eos", "--num-requests", "20"]
    (slow, quick), requests, _ = measure(capsys, server, tmp_path, *words, "--rate", "100,inf")
    for row in (slow, quick):
        assert (row["num_ok"], row["num_failed"], row["num_output_tokens"]) == (20, 0, 240)
        assert row["finish_reasons"] == {"length": 20} and row["num_without_usage"] == 0
        assert row["ttft_ms"]["p50"] > 0 and row["tokens_per_chunk"] >= 1
    assert all(one["num_prompt_tokens"] > 5 and one["ttft_ms"] <= one["whole_ms"] for one in requests)
    (row,), _, _ = measure(capsys, server, tmp_path, *words, "--concurrency", "4", "--temperature", "1")
    assert row["num_ok"] == 20 and row["num_output_tokens"] == 240


def test_a_queue_that_is_full_and_answers_that_last_too_long(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path
) -> None:
    room, count = NUM_SLOTS + MAX_QUEUE, 150
    words = ["--max-tokens", "100", "--ignore-eos", "--num-requests"]
    (row,), _, error = measure(capsys, server, tmp_path, *words, str(count), "--rate", "inf", "--warmup", "0")
    assert row["num_ok"] >= room and row["num_ok"] + row["failures"]["http 429"] == count
    assert "requests failed: http 429: the queue is full" in error
    (row,), _, _ = measure(capsys, server, tmp_path, *words, "40", "--concurrency", "40", "--timeout", "0.15")
    assert row["num_ok"] + row["failures"].get("timeout", 0) == 40
    deadline = time.monotonic() + 10  # clients that gave up hold nothing
    while server.gauge("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.gauge("vllm:num_requests_running") == server.gauge("vllm:num_requests_waiting") == 0


def test_fields_that_the_server_refuses(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path
) -> None:
    words = ["--url", server.url, "--rate", "1", "--extra-body", '{"top_p": 7}']
    assert main(["load-test", *words]) == 2
    assert "refuses the first request (http 400: top_p must be above 0" in capsys.readouterr().err
