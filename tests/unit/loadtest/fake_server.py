"""A server that answers as it is told to, in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def fake_server(answer: Answer, models: Any = None) -> Iterator[str]:
    """Its address. `models`: the body of the list of models; an int is a status."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    address: list[str] = []

    async def list_models(request: web.Request) -> web.Response:
        if isinstance(models, int):
            return web.json_response({"error": {"message": "not for you"}}, status=models)
        return web.json_response({"data": [{"id": "tiny"}]} if models is None else models)

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


async def stream(request: web.Request, pieces: list[bytes], pause: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(pause)
    return response


def text(word: str, reason: str | None = None) -> bytes:
    ending = "null" if reason is None else f'"{reason}"'
    return f'data: {{"choices": [{{"delta": {{"content": "{word}"}}, "finish_reason": {ending}}}]}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"
