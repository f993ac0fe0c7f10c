"""Calls over HTTP. Whatever goes wrong with a call is told in its record; nothing is raised but cancellation."""

import time
from typing import Any

import aiohttp
import msgspec

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.reading import decode_json
from blockpilot.loadtest.config import CallConfig
from blockpilot.loadtest.prompts import Prompt
from blockpilot.loadtest.records import Failure, Record
from blockpilot.loadtest.stream import Stream, read_message

_MAX_ERROR_BODY = 1 << 20
_MAX_MODELS_BODY = 16 << 20
_KEPT_SECONDS = 2.0  # less than servers keep an idle connection, so that none closes while a request is on its way
_SECONDS_FOR_MODELS = 60.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def open_session(config: CallConfig) -> aiohttp.ClientSession:
    """Any number of connections, no proxy, no cookies, no redirects to where the key must not go."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
        timeout=aiohttp.ClientTimeout(total=config.timeout),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def list_models(session: aiohttp.ClientSession, config: CallConfig) -> list[str] | Failure:
    """What the server calls its models, or why it does not say; an error where no server answers at all."""
    limit = aiohttp.ClientTimeout(total=min(config.timeout, _SECONDS_FOR_MODELS))
    try:
        async with session.get(config.models_url, timeout=limit, allow_redirects=False) as response:
            body = await _read_some(response, _MAX_MODELS_BODY)
            if response.status != 200:
                return _http_failure(response.status, body)
    except TimeoutError as error:
        raise BlockPilotError(f"{config.url} does not answer within {limit.total:g} s") from error
    except aiohttp.InvalidURL as error:
        raise InputError(f"--url {config.url}: this is no address: give one such as http://127.0.0.1:8000") from error
    except (aiohttp.ClientError, OSError) as error:
        reason = str(_connection_failure(error))
        raise InputError(f"cannot reach {config.url} ({reason}): start the server, or check --url") from error
    try:
        return [model.id for model in decode_json(body, _Models, config.models_url).data]
    except InputError as error:
        return Failure("malformed list of models", str(error))


async def send(
    session: aiohttp.ClientSession, config: CallConfig, prompt: Prompt, *, number: int, planned: float
) -> Record:
    """One request, from its planned time to the end of its answer."""
    stream = Stream()
    body = msgspec.json.encode(config.body(list(prompt.messages), config.seed + number))
    sent = time.perf_counter()
    failure = await _receive(session, config, body, stream) or stream.failure
    ended = time.perf_counter() if stream.ended is None or failure is not None else stream.ended
    return Record(
        number=number,
        prompt_id=prompt.id,
        planned=planned,
        sent=sent,
        ended=ended,
        chunk_times=stream.chunk_times,
        num_tokens=stream.num_tokens,
        num_prompt_tokens=stream.num_prompt_tokens,
        has_usage=stream.has_usage,
        finish_reason=stream.finish_reason,
        failure=failure,
    )


async def _receive(session: aiohttp.ClientSession, config: CallConfig, body: bytes, stream: Stream) -> Failure | None:
    """Feeds the stream; says what the stream itself cannot know."""
    try:
        async with session.post(config.call_url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                return _http_failure(response.status, await _read_some(response, _MAX_ERROR_BODY))
            if response.content_type == "application/json":
                return Failure("no stream", "the server answered at once: it does not stream")
            async for piece in response.content.iter_any():
                stream.feed(piece, time.perf_counter())
                if stream.failure is not None:
                    return None
            stream.close(time.perf_counter())
    except TimeoutError:
        return None if stream.is_done else Failure("timeout", f"no whole answer within {config.timeout:g} s")
    except aiohttp.ClientPayloadError as error:
        return None if stream.is_done else Failure("cut stream", _reason(error))
    except (aiohttp.ClientError, OSError) as error:
        return None if stream.is_done else _connection_failure(error)
    return None


def _http_failure(status: int, body: bytes) -> Failure:
    return Failure(f"http {status}", read_message(body))


def _connection_failure(error: Exception) -> Failure:
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return Failure("connection lost", _reason(error))
    if isinstance(error, aiohttp.ClientConnectorError):
        inner = error.os_error
        is_refused = isinstance(inner, ConnectionRefusedError)
        return Failure("connection refused") if is_refused else Failure("no connection", _reason(inner))
    kind = "connection lost" if isinstance(error, aiohttp.ClientConnectionError) else "no HTTP answer"
    return Failure(kind, _reason(error))


def _reason(error: Any) -> str:
    found = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(found).split())[:200]


async def _read_some(response: aiohttp.ClientResponse, most: int) -> bytes:
    data = b""
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > most:
            break
    return data[:most]
