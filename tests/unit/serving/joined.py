"""Both sides of the server in one process, for tests."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blockpilot import LLM
from blockpilot.serving.app import Server
from blockpilot.serving.engine_side import EngineSide
from blockpilot.serving.exchange import Exchange
from blockpilot.serving.settings import ServeConfig
from blockpilot.serving.web import read_hello


@contextmanager
def joined(llm: LLM, config: ServeConfig) -> Iterator[Server]:
    """The web side, over an engine that takes its steps in a thread."""
    here, there = socket.socketpair()
    side = EngineSide(llm, here, config)
    thread = threading.Thread(target=side.run)
    thread.start()
    try:
        found = read_hello(there)
        assert found is not None
        yield Server(Exchange(there), *found)
    finally:
        there.close()
        thread.join(60)
        assert not thread.is_alive()
