"""`blockpilot serve` as a process: it answers, ends in order, and says in one line why it cannot."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockpilot.models.decoder import Decoder
from blockpilot.models.weights import save_decoder_folder
from tests.tiny import CONFIGS, make_decoder
from tests.unit.training.pieces import chat_tokenizer

pytestmark = pytest.mark.slow

SECONDS = 120
LONG = {"prompt": "what is", "max_tokens": 12000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers for long."""
    folder = tmp_path_factory.mktemp("serving") / "endless"
    endless = Decoder(replace(CONFIGS["llama"], context_length=2**14, eos_token_ids=()))
    endless.load_state_dict(make_decoder().state_dict())
    save_decoder_folder(endless, folder)
    chat_tokenizer().save(folder)
    return folder


@contextmanager
def serving(target: Path, stderr: Path, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """The process and its address, once it answers."""
    command = [sys.executable, "-m", "blockpilot", "serve", "--target", str(target), "--drafter", "ngram"]
    command += ["--port", "0", "--slots", "2", "--context-length", "16000", *words]
    with stderr.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while (found := re.search(r"http://[0-9.]+:\d+", stderr.read_text(encoding="utf-8"))) is None:
            assert process.poll() is None and time.monotonic() < deadline, stderr.read_text(encoding="utf-8")
            time.sleep(0.05)
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


@contextmanager
def asking(url: str) -> Iterator[Iterator[str]]:
    """An answer on its way: what its events hold."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=SECONDS) as response:
        assert response.status_code == 200
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line)


def last_choice(lines: list[str]) -> dict[str, Any]:
    assert lines[-1] == "[DONE]"
    return dict(json.loads(lines[-2])["choices"][0])


def test_answers_that_take_too_long_are_ended_with_a_reason(target: Path, tmp_path: Path) -> None:
    with serving(target, tmp_path / "stderr", "--drain-seconds", "1") as (process, url):
        with asking(url) as lines:
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert last_choice(rest)["finish_reason"] == "abort"
        assert process.wait(SECONDS) == 0
    assert "finishing answers, at most 1 s" in (tmp_path / "stderr").read_text(encoding="utf-8")


def test_a_second_signal_ends_at_once(target: Path, tmp_path: Path) -> None:
    with serving(target, tmp_path / "stderr") as (process, url):
        with asking(url) as lines:
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert last_choice(rest)["finish_reason"] == "abort"
        assert process.wait(SECONDS) == 0


def test_an_idle_server_ends_at_once(target: Path, tmp_path: Path) -> None:
    with serving(target, tmp_path / "stderr") as (process, url):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_web_side_that_dies_takes_the_server_with_it(target: Path, tmp_path: Path) -> None:
    with serving(target, tmp_path / "stderr") as (process, _):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split():
            os.kill(int(child), signal.SIGKILL)
        assert process.wait(SECONDS) == 1
    assert "blockpilot: error: the web side has ended with code -9" in (tmp_path / "stderr").read_text(encoding="utf-8")


def test_an_engine_that_dies_leaves_nothing_behind(target: Path, tmp_path: Path) -> None:
    with serving(target, tmp_path / "stderr") as (process, url):
        with asking(url) as lines:
            next(lines)
            process.kill()
            rest = list(lines)
        assert json.loads(rest[-2])["error"]["message"] == "the engine has ended"
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                httpx.get(f"{url}/health")
            except httpx.TransportError:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["serve", "--port", str(taken.getsockname()[1])]
        found = subprocess.run([sys.executable, "-m", "blockpilot", *words], capture_output=True, timeout=SECONDS)
    assert found.returncode == 2
    line = found.stderr.decode()
    assert line.count("\n") == 1 and "cannot listen on 127.0.0.1" in line and "choose another" in line
