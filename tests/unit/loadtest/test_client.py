"""Calls to a server that does what it likes: each ends in a record, and the record says what went wrong."""

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.loadtest.client import list_models, open_session, send
from blockpilot.loadtest.config import CallConfig
from blockpilot.loadtest.prompts import Prompt
from blockpilot.loadtest.records import Failure, Record
from tests.unit.loadtest.fake_server import DONE, Answer, fake_server, stream, text

PROMPT = Prompt("p", ({"role": "user", "content": "hello"},))


def call(answer: Answer, **settings: Any) -> Record:
    with fake_server(answer) as url:
        return send_one(CallConfig(url=url, model="tiny", **settings))


def send_one(config: CallConfig) -> Record:
    async def go() -> Record:
        async with open_session(config) as session:
            return await send(session, config, PROMPT, number=3, planned=0.0)

    return asyncio.run(go())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_is_asked(endpoint: Any) -> None:
    seen: list[tuple[str, dict[str, Any], str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, await request.json(), request.headers["Authorization"]))
        return await stream(request, [text("a"), text("b", "stop"), DONE])

    record = call(answer, endpoint=endpoint, api_key="sesame", seed=4, ignores_eos=True, extra_body={"top_p": 0.5})
    assert record.failure is None and record.num_tokens == 2 and record.ttft is not None and record.ttft > 0
    ((path, body, key),) = seen
    asked = {"prompt": "hello"} if endpoint == "completions" else {"messages": list(PROMPT.messages)}
    assert path == ("/v1/completions" if endpoint == "completions" else "/v1/chat/completions")
    assert key == "Bearer sesame"
    assert body == {
        "model": "tiny",
        **asked,
        "max_tokens": 128,
        "temperature": 0.0,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.5,
    }


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the queue\nis full"}}, status=429)


async def answer_at_once(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": []})


async def hang(request: web.Request) -> web.StreamResponse:
    return await stream(request, [text("a")] * 100, pause=0.1)


async def hang_up(request: web.Request) -> web.StreamResponse:
    response = await stream(request, [text("a")])
    assert request.transport is not None
    request.transport.abort()
    return response


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("/elsewhere")


async def end_early(request: web.Request) -> web.StreamResponse:
    return await stream(request, [text("a")])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refuse, "http 429: the queue is full"),
        (answer_at_once, "no stream: the server answered at once: it does not stream"),
        (hang, "timeout: no whole answer within 0.3 s"),
        (hang_up, "cut stream: "),
        (end_early, "cut stream: it ended before the answer did"),
        (redirect, "http 307: "),
    ],
)
def test_failures_are_told(answer: Answer, expected: str) -> None:
    record = call(answer, timeout=0.3)
    assert not record.is_ok and str(record.failure).startswith(expected)
    assert record.ended >= record.sent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_nobody_there() -> None:
    config = CallConfig(url=f"http://127.0.0.1:{free_port()}")
    assert str(send_one(config).failure) == "connection refused"
    with pytest.raises(InputError, match=r"cannot reach .*connection refused.*check --url"):
        find_models(config)


def find_models(config: CallConfig) -> list[str] | Failure:
    async def go() -> list[str] | Failure:
        async with open_session(config) as session:
            return await list_models(session, config)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (None, ["tiny"]),
        ({"data": []}, []),
        ({"data": [{"id": "a", "more": 1}, {"id": "b"}]}, ["a", "b"]),
        (401, "http 401: not for you"),
        ([], "malformed list of models: "),
        ({"data": [{"id": 5}]}, "malformed list of models: "),
    ],
)
def test_names_of_models(models: Any, expected: Any) -> None:
    with fake_server(refuse, models) as url:
        found = find_models(CallConfig(url=url))
    assert found == expected if isinstance(expected, list) else str(found).startswith(expected)


def test_a_server_that_says_nothing() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = CallConfig(url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.2)
        with pytest.raises(BlockPilotError, match=r"does not answer within 0\.2 s"):
            find_models(config)
        assert str(send_one(config).failure).startswith("timeout")


def test_a_server_that_speaks_something_else() -> None:
    async def serve() -> Record:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        config = CallConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5)
        async with server, open_session(config) as session:
            return await send(session, config, PROMPT, number=0, planned=0.0)

    failure = asyncio.run(serve()).failure
    assert failure is not None and failure.kind in ("no HTTP answer", "connection lost")


def test_bodies_are_json_of_any_text() -> None:
    prompt = Prompt("p", ({"role": "user", "content": 'ö "\n\u2028'},))
    body = CallConfig(url="http://127.0.0.1").body(list(prompt.messages), 0)
    assert json.loads(json.dumps(body))["messages"] == list(prompt.messages)
