"""`vllm serve` with the plugin on, in its three kinds of processes, asked with OpenAI's client; a version too new."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from tests.vllm.answering import NUM_TOKENS, PROMPTS
from tests.vllm.conftest import NUM_DRAFT_TOKENS

pytestmark = pytest.mark.real_model
STARTUP_SECONDS = 240


@pytest.fixture(scope="module")
def server(
    target_folder: Path, drafter_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    speculative = f'{{"method": "dflash", "model": "{drafter_folder}", "num_speculative_tokens": {NUM_DRAFT_TOKENS}}}'
    command = [
        sys.executable, str(Path(__file__).with_name("vllm_command.py")), "serve", str(target_folder),
        "--served-model-name", "target",
        "--speculative-config", speculative, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4",
    ]  # fmt: skip
    environment = {
        "BLOCKPILOT_PILOT": "chain-step",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", log=log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


def test_a_client_gets_the_same_text_from_every_pilot(server, target_folder, plain_answers):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    for index, override in ((0, None), (1, None), (1, "fixed:4"), (2, "ar")):
        answer = client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": PROMPTS[index]}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"vllm_xargs": {"blockpilot": override}} if override else {},
        )
        assert answer.choices[0].message.content == tokenizer.decode(plain_answers[index])
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        metrics = response.read().decode()
    found = {
        match["name"]: float(match["value"])
        for match in re.finditer(r"^vllm:blockpilot_(?P<name>\w+)\{[^}]*\} (?P<value>\S+)$", metrics, re.MULTILINE)
    }
    assert found["saved_tokens_total"] > found["drafted_tokens_total"] > found["accepted_tokens_total"] > 0
    steps = re.findall(r'^vllm:blockpilot_steps_total\{[^}]*draft_tokens="(\d+)"[^}]*\} (\S+)$', metrics, re.MULTILINE)
    drafted = sum(int(size) * float(count) for size, count in steps)
    assert len(steps) == NUM_DRAFT_TOKENS + 1 and drafted == found["drafted_tokens_total"]


def test_the_plugin_is_on_once(server):
    assert server.log.read_text().count("BlockPilot is on: pilot chain-step") == 1  # of three processes only one drafts


def test_an_unsupported_version_is_named_and_serves_as_it_is(ask_elsewhere, plain_answers):
    ran = ask_elsewhere("--version", "0.99.0", "--num-prompts", "2", BLOCKPILOT_PILOT="chain-step")
    assert ran.answers == plain_answers[:2]
    warnings = [line for line in ran.log.splitlines() if "BlockPilot" in line]
    assert len(warnings) == 1 and ">=0.32,<0.33" in warnings[0] and "0.99.0" in warnings[0]
