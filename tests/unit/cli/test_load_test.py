"""`blockpilot load-test`: bad input is one line, what was measured is shown and kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from blockpilot.cli.main import main
from tests.unit.loadtest.fake_server import DONE, fake_server, stream, text
from tests.unit.loadtest.test_client import free_port

HERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCKPILOT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["model"] != "tiny":
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 3}}\n\n'
    return await stream(request, [text("a"), text("b", "stop"), usage, DONE], pause=0.001)


async def fail(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of memory"}}, status=500)


async def fail_sometimes(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    return await (fail(request) if body["seed"] % 3 == 2 else answer(request))


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is refused."""
    assert main(["load-test", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("blockpilot: error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --rate or --concurrency"),
        (["--rate", "1", "--concurrency", "1"], "give either --rate or --concurrency"),
        (["--rate", "fast"], "--rate 'fast'"),
        (["--rate", "-1"], "--rate '-1'"),
        (["--rate", "0"], "--rate '0'"),
        (["--rate", "1,,2"], "--rate '1,,2'"),
        (["--rate", "1e99"], "--rate '1e99'"),
        (["--rate", ",".join(["1"] * 65)], "65 loads are too many"),
        (["--concurrency", "0"], "--concurrency '0'"),
        (["--concurrency", "1.5"], "--concurrency '1.5'"),
        (["--concurrency", "8", "--num-requests", "4"], "--concurrency 8 is never reached"),
        (["--rate", "1", "--num-requests", "0"], "num-requests must be at least 1"),
        (["--rate", "1", "--warmup", "-1"], "warmup must be at least 0"),
        (["--rate", "1", "--ttft-limit", "0"], "--ttft-limit"),
        (["--rate", "1", "--tpot-limit", "nan"], "--tpot-limit"),
        (["--rate", "1", "--timeout", "inf"], "--timeout"),
        (["--rate", "1", "--temperature", "-1"], "--temperature"),
        (["--rate", "1", "--max-tokens", "0"], "max-tokens must be at least 1"),
        (["--rate", "1", "--extra-body", "{"], "--extra-body: not valid JSON"),
        (["--rate", "1", "--extra-body", "[]"], "--extra-body"),
        (["--rate", "1", "--extra-body", '{"stream": false}'], "--extra-body"),
        (["--rate", "1", "--url", "localhost"], "give an address such as"),
        (["--rate", "1", "--url", "http://127.0.0.1:x"], "give an address such as"),
        (["--rate", "1", "--prompts", "nowhere.txt"], "'nowhere.txt' is no file"),
        (["--rate", "1", "--prompts", "."], "."),
        (["--rate", "1", "--out", "."], "--out . is a folder"),
        (["--rate", "1", "--endpoint", "images"], "argument --endpoint"),
        (["--rate", "1", "--unheard-of"], "unrecognized arguments"),
    ],
)
def test_bad_words_are_refused_before_the_server_hears_of_them(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refuse(capsys, "--url", HERE, *words)


def test_prompts_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"prompt": "\xff"}\n')
    assert "bad.jsonl" in refuse(capsys, "--rate", "1", "--prompts", str(bad))
    bad.write_text('{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}\n')
    line = refuse(capsys, "--rate", "1", "--prompts", str(bad), "--endpoint", "completions")
    assert "is a conversation" in line


def test_nobody_answers_there(capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, "--rate", "1", "--url", f"http://127.0.0.1:{free_port()}/v1")
    assert "cannot reach" in line and "connection refused" in line


def test_the_server_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(answer) as url:
        line = refuse(capsys, "--rate", "1", "--url", url, "--model", "gpt-9")
    assert "refuses the first request (http 404: no such model)" in line
    with fake_server(answer, models=401) as url:
        line = refuse(capsys, "--rate", "1", "--url", url)
    assert "http 401: not for you" in line and "--model" in line


def test_a_key_is_told_nobody(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake_server(answer) as url:
        words = ["--url", url, "--concurrency", "1", "--num-requests", "1", "--api-key", "sesame", "--json"]
        assert main(["load-test", *words, "--out", str(tmp_path / "r.json")]) == 0
    captured = capsys.readouterr()
    assert "sesame" not in captured.out + captured.err + (tmp_path / "r.json").read_text()


def test_rows_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    with fake_server(fail_sometimes) as url:
        words = ["--url", url, "--rate", "200,inf", "--num-requests", "9", "--warmup", "2", "--out", str(out)]
        assert main(["load-test", *words, "--ttft-limit", "10000", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [row["rate"] for row in result["loads"]] == [200.0, "inf"] and result["is_complete"]
    for row in result["loads"]:
        assert (row["num_ok"], row["num_failed"], row["failures"]) == (6, 3, {"http 500": 3})
        assert row["num_output_tokens"] == 24 and row["tokens_per_chunk"] == 2
        assert row["goodput_share"] == pytest.approx(2 / 3)
    assert "rate 200: 3 of 9 requests failed: http 500: out of memory" in captured.err
    kept: dict[str, Any] = json.loads(out.read_text())
    assert [len(row["requests"]) for row in kept["loads"]] == [9, 9] and os.listdir(out.parent) == ["result.json"]
    for row in kept["loads"]:
        row.pop("requests")
    assert kept == result


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(answer) as url:
        assert main(["load-test", "--url", url, "--concurrency", "1,2", "--num-requests", "4"]) == 0
    captured = capsys.readouterr()
    assert "clients" in captured.out and "TTFT" in captured.out and "failed" not in captured.out
    assert "goodput" not in captured.out


def test_a_server_that_answers_nothing_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake_server(fail) as url:
        words = ["--url", url, "--concurrency", "1", "--num-requests", "3", "--out", str(tmp_path / "r.json")]
        assert main(["load-test", *words]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "blockpilot: error: no request was answered: nothing was measured"
    assert "a warm-up request failed (http 500: out of memory)" in captured.err
    assert json.loads((tmp_path / "r.json").read_text())["loads"][0]["num_failed"] == 3


def test_an_old_result_stays_where_the_disk_is_full(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockpilot.core import files

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "r.json"
    out.write_text("old")
    monkeypatch.setattr(files, "_rename", fill_up)
    with fake_server(answer) as url:
        words = ["--url", url, "--concurrency", "1", "--num-requests", "3", "--out", str(out), "--json"]
        assert main(["load-test", *words]) == 1
    assert json.loads(capsys.readouterr().out)["loads"][0]["num_ok"] == 3  # shown all the same
    assert out.read_text() == "old"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_keeps_what_was_measured(tmp_path: Path, number: int, code: int) -> None:
    asked: list[int] = []

    async def answer_four(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        return await (answer(request) if len(asked) < 5 else stream(request, [text("a")] * 600, pause=0.1))

    out = tmp_path / "r.json"
    with fake_server(answer_four) as url:
        words = ["--url", url, "--concurrency", "1", "--warmup", "0", "--json", "--out", str(out)]
        command = [sys.executable, "-m", "blockpilot", "load-test", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while len(asked) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        shown, error = process.communicate(timeout=20)
    assert process.returncode == code, error
    result = json.loads(shown)
    assert not result["is_complete"] and result["loads"][0]["num_ok"] == 4
    assert len(json.loads(out.read_text())["loads"][0]["requests"]) == 4
