"""The web side's own process: `python -m blockpilot.serving.web LINK LISTENER`, two sockets that it inherits."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from blockpilot.serving.app import Server
from blockpilot.serving.exchange import Exchange
from blockpilot.serving.settings import Facts, ServeConfig
from blockpilot.serving.wire import Hello, decode_engine, receive

_BACKLOG = 2048
_GRACE_SECONDS = 5  # for clients to take the end of an answer


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine's process hears them, and says what to do
        signal.signal(number, signal.SIG_IGN)
    link, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    if (found := read_hello(link)) is None:
        return 0
    config, facts = found
    server = Server(Exchange(link), config, facts)
    listener.listen(_BACKLOG)
    _Uvicorn(server).run(sockets=[listener])
    return 0


def read_hello(link: socket.socket) -> tuple[ServeConfig, Facts] | None:
    """What the engine says first; None if it ends before."""
    if (body := receive(link)) is None:
        return None
    hello = decode_engine(body)
    assert isinstance(hello, Hello)
    return hello.config, hello.facts


class _Uvicorn(uvicorn.Server):
    """It ends when the engine's process says so: at once nobody new is heard, later answers in flight are cut short."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn.Config(server.app(), log_level="warning", access_log=False, server_header=False))
        self._exchange = server.exchange
        self._exchange.when_drained = self._end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _end(self, seconds: float) -> None:
        self.should_exit = True
        self.config.timeout_graceful_shutdown = int(seconds) + _GRACE_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._exchange.end_all)


if __name__ == "__main__":
    sys.exit(main())
