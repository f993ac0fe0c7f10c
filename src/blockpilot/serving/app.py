"""The web side: routes, admission, streams. One event loop, in a process of its own."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer as Backend

from blockpilot import __version__
from blockpilot.core.records import Completion
from blockpilot.serving.answers import Answer
from blockpilot.serving.errors import ApiError, bad_request
from blockpilot.serving.exchange import Call, Exchange
from blockpilot.serving.metrics import Metrics
from blockpilot.serving.prepare import Preparer
from blockpilot.serving.protocol import (
    Asked,
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    TokenizeCall,
    read_call,
)
from blockpilot.serving.settings import Facts, ServeConfig, TokenizerParts
from blockpilot.serving.stream import EventStream, unless_gone
from blockpilot.serving.wire import Ask
from blockpilot.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_PAGE = Path(__file__).parent / "page.html"
_LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]", "testserver"]
_DONE = b"data: [DONE]\n\n"
_RETRY_SECONDS = 2
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    def __init__(self, exchange: Exchange, config: ServeConfig, facts: Facts) -> None:
        self.exchange, self.config, self.facts = exchange, config, facts
        self.tokenizer = make_tokenizer(facts.tokenizer)
        self.preparer = Preparer(facts, self.tokenizer, model_name=config.model_name)
        self.metrics = Metrics(config.model_name)
        exchange.note = self.metrics.note

    def app(self) -> Starlette:
        calls: list[tuple[str, str, Handler]] = [
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/completions", "POST", self.complete),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/props", "GET", self.props),
            ("/metrics", "GET", self.show_metrics),
        ]
        routes = [Route(path, self._guarded(handler), methods=[method]) for path, method, handler in calls]
        routes += [Route("/health", self.health), Route("/", self.page)]
        middleware = []
        if self.config.is_local:  # a page of the web must not reach us by a name of its own
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_HOSTS, www_redirect=False))
        if self.config.origins:
            allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
            middleware.append(Middleware(CORSMiddleware, allow_origins=list(self.config.origins), **allowed))
        handlers: dict[Any, Any] = {HTTPException: _show_http_error, Exception: _show_failure}
        return Starlette(routes=routes, middleware=middleware, lifespan=self._live, exception_handlers=handlers)

    async def chat(self, request: Request) -> Response:
        call = await self._read(request, ChatCall)
        asks = await asyncio.to_thread(self.preparer.chat, call)
        return await self._answer(request, call, asks, is_chat=True)

    async def complete(self, request: Request) -> Response:
        call = await self._read(request, CompletionCall)
        asks = await asyncio.to_thread(self.preparer.completion, call)
        return await self._answer(request, call, asks, is_chat=False)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe_model()]})

    async def model(self, request: Request) -> Response:
        self.preparer.require_model(request.path_params["name"])
        return _json(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        model = {"id": self.config.model_name, "object": "model", "created": 0, "owned_by": "blockpilot"}
        return model | {"max_model_len": self.facts.context_length}

    async def tokenize(self, request: Request) -> Response:
        call = await self._read(request, TokenizeCall)
        self.preparer.require_model(call.model)
        texts = [text for text in (call.prompt, call.content) if text is not None]
        if call.messages is not None:
            texts.append(self.preparer.render_chat(call.messages))
        if len(texts) != 1:
            raise bad_request("give one of prompt, content and messages", "prompt")
        ids = await asyncio.to_thread(self.tokenizer.encode, texts[0])
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.facts.context_length})

    async def detokenize(self, request: Request) -> Response:
        call = await self._read(request, DetokenizeCall)
        size = self.facts.vocab_size
        if not all(0 <= token_id < size for token_id in call.tokens):
            raise bad_request(f"tokens holds ids outside the vocabulary of {size}", "tokens")
        text = self.tokenizer.decode(call.tokens, skip_special_tokens=False)
        return _json({"prompt": text, "content": text})

    async def props(self, request: Request) -> Response:
        facts = self.facts
        return _json(
            {
                "model": self.config.model_name,
                "total_slots": facts.num_slots,
                "context_length": facts.context_length,
                "drafter": facts.drafter,
                "max_block_size": facts.max_block_size,
                "pilot": facts.pilot,
                "device": facts.device,
                "dtype": facts.dtype,
                "exact": facts.is_exact,
                "chat_template": self.tokenizer.chat_template,
                "version": __version__,
            }
        )

    async def show_metrics(self, request: Request) -> Response:
        body = self.metrics.render(self.exchange.load)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        if self.exchange.is_draining or not self.exchange.is_up:
            return _json({"status": "ending"}, status=503)
        return _json({"status": "ok"})

    async def page(self, request: Request) -> Response:
        return FileResponse(_PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})

    async def _answer(self, request: Request, asked: Asked, asks: Sequence[Ask], *, is_chat: bool) -> Response:
        call = self._admit(asks)
        own = asked.blockpilot
        has_timings = own is not None and (own.timings or own.trees)
        answer = Answer(self.config.model_name, self.tokenizer, is_chat, has_timings, num_choices=asked.num_choices)
        is_streaming = False
        try:
            await call.accepted()
            if asked.stream:
                is_streaming = True
                has_usage = asked.stream_options is not None and asked.stream_options.include_usage
                events = self._events(answer, call, has_usage=has_usage)
                return EventStream(events, self.config.stall_seconds, lambda: self.exchange.leave(call))
            completions = await unless_gone(request.receive, call.completions())
            await self._remember(call)
            return _json(answer.whole(completions))
        finally:
            if not is_streaming:
                self.exchange.leave(call)

    def _admit(self, asks: Sequence[Ask]) -> Call:
        if self.exchange.is_draining:
            raise ApiError(503, "the server is ending")
        room = self.facts.num_slots + self.config.max_queue
        if len(asks) > room:
            raise bad_request(f"{len(asks)} choices at once are too many: slots and queue hold {room}", "n")
        if self.exchange.num_open + len(asks) > room:
            error = ApiError(429, "the queue is full: try again later", code="queue_full")
            error.headers["Retry-After"] = str(_RETRY_SECONDS)
            raise error
        return self.exchange.submit(asks, self.config.max_seconds)

    async def _events(self, answer: Answer, call: Call, *, has_usage: bool) -> AsyncIterator[bytes]:
        found: dict[int, Completion] = {}
        opened: set[int] = set()
        try:
            async for index, update in call.updates():
                if answer.is_chat and index not in opened:
                    opened.add(index)
                    yield _event(answer.opening(index))
                if update.completion is not None:
                    found[index] = update.completion
                    if len(found) == len(call.choices):
                        await self._remember(call)
                yield _event(answer.chunk(index, update))
            if has_usage:
                yield _event(answer.usage_chunk([found[index] for index in range(len(call.choices))]))
        except ApiError as error:  # the status is sent already
            self.metrics.note_refusal(error.status)
            yield _event(error.body())
        yield _DONE

    async def _remember(self, call: Call) -> None:
        for choice in call.choices:
            if choice.completion is not None:
                await asyncio.to_thread(self.preparer.remember, choice.ask, choice.completion)

    async def _read(self, request: Request, kind: Any) -> Any:
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self.config.stall_seconds):
                async for piece in request.stream():
                    size += len(piece)
                    if size > self.config.max_body:
                        raise ApiError(413, f"the body is larger than {self.config.max_body >> 20} MB")
                    pieces.append(piece)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {self.config.stall_seconds:g} s") from error
        return read_call(b"".join(pieces), kind)

    def _guarded(self, handler: Handler) -> Handler:
        """With the key, where one is set; errors in the protocol's form."""

        async def run(request: Request) -> Response:
            try:
                self._require_key(request)
                return await handler(request)
            except ApiError as error:
                self.metrics.note_refusal(error.status)
                return _json(error.body(), status=error.status, headers=error.headers)
            except ClientDisconnect:
                return Response(status_code=499)

        return run

    def _require_key(self, request: Request) -> None:
        if self.config.api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.config.api_key}".encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    @asynccontextmanager
    async def _live(self, app: Starlette) -> AsyncIterator[None]:
        await self.exchange.start()
        try:
            yield
        finally:
            await self.exchange.stop()


def make_tokenizer(parts: TokenizerParts) -> Tokenizer:
    return Tokenizer(
        Backend.from_str(parts.backend),
        special_tokens=parts.special_tokens,
        chat_template=parts.chat_template,
        eos_token_ids=parts.eos_token_ids,
    )


_POLICY = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def _json(value: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _show_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    return _json(ApiError(error.status_code, error.detail).body(), status=error.status_code)


async def _show_failure(request: Request, error: Exception) -> Response:
    logger.error("a call failed", exc_info=error)
    return _json(ApiError(500, "an internal error; the log says more").body(), status=500)
