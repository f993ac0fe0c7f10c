"""Server-sent events of an answer, and what happens when nobody reads them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)
Found = TypeVar("Found")


class EventStream(Response):
    """It ends when its events do, when the client goes away, or when the client has read nothing for a while."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stall_seconds: float, when_over: Callable[[], None]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._events, self._stall_seconds, self._when_over = events, stall_seconds, when_over
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # proxies shall not hold it back
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._when_over()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await self._send(send, event, more_body=True)
        await self._send(send, b"", more_body=False)

    async def _send(self, send: Send, body: bytes, *, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        except TimeoutError as error:
            logger.warning("a client has read nothing for %g s: its answer is dropped", self._stall_seconds)
            raise ClientDisconnect from error


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, Found]) -> Found:
    """The work's result; ClientDisconnect where the client goes away first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
