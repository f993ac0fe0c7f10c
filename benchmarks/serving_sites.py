"""The two sides that `serving.py` compares, each a process of its own: the server, and an engine without one.

Run as a program this is the second: it reads asks from standard input, one JSON object per line, and answers each with
the times of what `LLM.stream` yields.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from blockpilot.core.errors import BlockPilotError
from blockpilot.loadtest.client import open_session, send
from blockpilot.loadtest.config import CallConfig
from blockpilot.loadtest.prompts import Prompt
from blockpilot.loadtest.records import Record

START_SECONDS = 300
Found = TypeVar("Found")


@dataclass(frozen=True)
class Reply:
    """Seconds from the ask to every piece of text, and what was written."""

    times: list[float]
    num_tokens: int

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def rate(self) -> float:
        """Tokens per second after the first text; its own tokens are one or few. No answer is so short that all of it
        comes at once, but those of tiny models in tests."""
        return (self.num_tokens - 1) / max(self.times[-1] - self.times[0], 1e-9)


class ServerSite:
    """`blockpilot serve`, and one client of it."""

    def __init__(self, model: Sequence[str], num_slots: int) -> None:
        """`model` are options that say what runs where."""
        self.port, self.num_slots = find_port(), num_slots
        config = CallConfig(url=f"http://127.0.0.1:{self.port}", ignores_eos=True)
        command = [sys.executable, "-m", "blockpilot", "serve", "--port", str(self.port), "--slots", str(num_slots)]
        self._process = subprocess.Popen([*command, *model], stderr=subprocess.DEVNULL)
        self._wait(config.url)
        model = json.loads(get(f"{config.url}/v1/models"))["data"][0]["id"]
        self.config = replace(config, model=model)
        self.facts = json.loads(get(f"{config.url}/props"))
        self.runner = asyncio.Runner()
        self.session: aiohttp.ClientSession = self.run(self._open())

    def __enter__(self) -> "ServerSite":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.run(self.session.close())
        self.runner.close()
        self._process.terminate()
        self._process.wait(60)

    def run(self, work: Coroutine[Any, Any, Found]) -> Found:
        return self.runner.run(work)

    def ask(self, text: str, max_tokens: int, pilot: str) -> Reply:
        return self.run(self.call([{"role": "user", "content": text}], max_tokens, blockpilot={"pilot": pilot}))

    async def call(self, messages: list[dict[str, Any]], max_tokens: int, **extra: Any) -> Reply:
        config = replace(
            self.config, max_tokens=max_tokens, extra_body=extra, ignores_eos="response_format" not in extra
        )
        record = await send(self.session, config, Prompt("-", tuple(messages)), number=0, planned=0.0)
        return read_record(record)

    async def write(self, messages: list[dict[str, Any]], max_tokens: int) -> str:
        """A whole answer."""
        body = self.config.body(messages, 0) | {"stream": False, "max_tokens": max_tokens}
        del body["stream_options"]
        async with self.session.post(self.config.call_url, data=json.dumps(body)) as response:
            found = await response.json()
        return str(found["choices"][0]["message"]["content"])

    async def _open(self) -> aiohttp.ClientSession:
        return open_session(self.config)

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get(f"{url}/health")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise BlockPilotError("the server did not start: run `blockpilot serve` to see why") from error
                time.sleep(0.1)


class EngineSite:
    """`LLM.stream` and `LLM.generate` in a process that serves nobody else."""

    def __init__(self, model: Sequence[str], num_slots: int) -> None:
        command = [sys.executable, __file__, *model, "--slots", str(num_slots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it is ready

    def __enter__(self) -> "EngineSite":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, text: str, max_tokens: int, pilot: str) -> Reply:
        return Reply(**self._send([text], max_tokens, pilot))

    def ask_together(self, texts: Sequence[str], max_tokens: int, pilot: str) -> float:
        """Tokens per second of all answers, as many at once as there are slots."""
        found = self._send(list(texts), max_tokens, pilot)
        return float(found["num_tokens"] / found["times"][-1])

    def _send(self, texts: list[str], max_tokens: int, pilot: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([texts, max_tokens, pilot]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BlockPilotError("the engine's process has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def read_record(record: Record) -> Reply:
    if record.failure is not None:
        raise BlockPilotError(f"a request failed: {record.failure}")
    return Reply([moment - record.sent for moment in record.chunk_times], record.num_tokens)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        body: bytes = response.read()
    return body


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def be_engine(target: str, device: str, num_slots: int) -> None:
    from blockpilot import LLM, EngineConfig, SamplingParams

    llm = LLM(target, config=EngineConfig(device=device, num_slots=num_slots, reuses_prefixes=True))
    for pilot in ("ar", "auto"):
        llm.generate("Hello.", SamplingParams(max_new_tokens=8), pilot=pilot)
    print("{}", flush=True)
    for line in sys.stdin:
        texts, max_tokens, pilot = json.loads(line)
        params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
        times, num_tokens, started = [], 0, time.perf_counter()
        if len(texts) > 1:
            num_tokens = sum(answer.num_tokens for answer in llm.generate(texts, params, pilot=pilot))
            times.append(time.perf_counter() - started)
        else:
            for update in llm.stream(texts[0], params, pilot=pilot):
                if update.new_text:
                    times.append(time.perf_counter() - started)
                if update.completion is not None:
                    num_tokens = update.completion.num_tokens
        print(json.dumps({"times": times, "num_tokens": num_tokens}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, required=True)
    given = parser.parse_args()
    be_engine(given.target, given.device, given.slots)
