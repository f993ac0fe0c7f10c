"""Clients of all manners: patient, slow, gone in the middle, deaf, or silent after half of what they have to say."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from tests.soak.asks import CHAT, Ask

_TRIES = 200  # while the queue is full
_DEAF_BUFFER = 4096


@dataclass
class Choice:
    text: str = ""
    reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Reply:
    """What came of an ask: `end` is a status, or how its client left."""

    end: str
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    num_refusals: int = 0  # by a full queue, before
    num_known: int | None = None  # tokens of a second turn that were not read again
    fault: str | None = None


class Clients:
    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    async def __aenter__(self) -> "Clients":
        limits = aiohttp.ClientTimeout(total=120)
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def ask(self, ask: Ask) -> Reply:
        """Whatever goes wrong is told in the reply."""
        try:
            if ask.manner in ("deaf", "half"):
                return await self._ask_rudely(ask)
            for attempt in range(_TRIES):
                reply = await (self._leave(ask) if ask.manner == "leave" else self._ask(ask))
                if ask.manner == "turns" and reply.end == "200" and reply.fault is None:
                    await self._go_on(ask, reply)
                reply.num_refusals = attempt
                if reply.end != "429":
                    return reply
                await asyncio.sleep(0.05)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError) as error:
            return Reply("error", fault=f"{type(error).__name__}: {error}")
        return Reply("429", fault="the queue stays full")

    async def _ask(self, ask: Ask) -> Reply:
        async with self._post(ask) as response:
            reply = Reply(str(response.status))
            if response.status not in ask.statuses and response.status != 429:
                reply.fault = f"status {response.status}: {(await response.text())[:300]}"
            elif response.status != 200:
                error = (await response.json())["error"]
                reply.fault = None if error["message"] and error["type"] else "an error without a message"
            elif response.content_type == "application/json":
                body = await response.json()
                reply.choices = [_read_choice(ask, choice) for choice in body["choices"]]
                reply.usage = body["usage"]
            else:
                await _read_stream(ask, response, reply)
            return reply

    async def _go_on(self, ask: Ask, reply: Reply) -> None:
        """A second turn, as it was drafted and plainly: both begin with the tokens that the first one has written."""
        answer = {"role": "assistant", "content": reply.choices[0].text}
        call = ask.call | {"messages": [*ask.call["messages"], answer, {"role": "user", "content": "and then?"}]}
        found = []
        for own in (call.get("blockpilot", {}), {"pilot": "ar"}):
            body = json.dumps(call | {"blockpilot": own}).encode()
            found.append(await self._ask(replace(ask, body=body)))
        drafted, plain = found
        if drafted.usage is None or plain.usage is None:  # the queue is full
            return
        reply.num_known = drafted.usage["prompt_tokens_details"]["cached_tokens"]
        is_alike = drafted.usage["prompt_tokens"] == plain.usage["prompt_tokens"]  # else one was forgotten meanwhile
        if is_alike and drafted.choices != plain.choices:
            reply.fault = f"the second turn is {drafted.choices}, plainly {plain.choices}"

    async def _leave(self, ask: Ask) -> Reply:
        """In the middle of a stream, or while a whole answer is written."""
        if ask.call.get("stream"):
            async with self._post(ask) as response:
                if response.status == 429:
                    return Reply("429")
                async for _ in response.content.iter_any():
                    await asyncio.sleep(ask.pause)
                    break
                response.close()
                return Reply("left")
        work = asyncio.create_task(self._ask(ask))
        await asyncio.sleep(ask.pause)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.wait([work])
        return Reply("left")

    def _post(self, ask: Ask) -> Any:
        return self.session.post(self.url + ask.path, data=ask.body, headers={"Content-Type": "application/json"})

    async def _ask_rudely(self, ask: Ask) -> Reply:
        """Over a bare socket: half a body and then nothing, or a whole one whose answer is never read."""
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _DEAF_BUFFER)
        line.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(line, ("127.0.0.1", self.port))
            body = ask.body if ask.manner == "deaf" else ask.body[: len(ask.body) // 2]
            head = f"POST {ask.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(ask.body)}\r\n\r\n"
            await loop.sock_sendall(line, head.encode() + body)
            await asyncio.sleep(ask.pause)
        finally:
            line.close()
        return Reply(ask.manner)


async def read_events(response: aiohttp.ClientResponse, pause: float) -> AsyncIterator[dict[str, Any]]:
    """Up to the end mark; an error where there is none."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                return
            yield json.loads(event.removeprefix(b"data: "))
        if pause:
            await asyncio.sleep(pause)
    raise ValueError("the stream ended without its mark")


async def _read_stream(ask: Ask, response: aiohttp.ClientResponse, reply: Reply) -> None:
    choices: dict[int, Choice] = {}
    async for event in read_events(response, ask.pause if ask.manner == "slow" else 0.0):
        if "error" in event:
            reply.fault = f"an error in the stream: {event['error']}"
        reply.usage = event.get("usage") or reply.usage
        for choice in event.get("choices", ()):
            found, new = choices.setdefault(choice["index"], Choice()), _read_choice(ask, choice)
            found.text += new.text
            found.reason = new.reason or found.reason
            found.logprobs += new.logprobs
    reply.choices = [choices[index] for index in sorted(choices)]


def _read_choice(ask: Ask, choice: dict[str, Any]) -> Choice:
    text = choice.get("delta", choice.get("message", {})).get("content") or "" if ask.path == CHAT else choice["text"]
    return Choice(text, choice["finish_reason"], [choice["logprobs"]] if choice.get("logprobs") else [])
