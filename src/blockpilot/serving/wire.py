"""What the web side and the engine tell each other, over a pair of sockets.

    engine -> web    Hello, then for each request Taken or Refused; after every step News; Dropped, Drain
    web -> engine    Ready, then Ask and Leave

A message is a frame: its length in four bytes, then MessagePack. Writing is left to a thread, so that a step never
waits for a reader.
"""

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from blockpilot.core.records import Update
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.serving.settings import Facts, ServeConfig

HEAD = struct.Struct("<I")
_AWAITED = 1 << 16  # bytes asked of a socket at once


class _Message(Struct, tag=True, array_like=True):
    """Of a kind that its tag names."""


class Hello(_Message):
    config: ServeConfig
    facts: Facts


class Taken(_Message):
    number: int


class Refused(_Message):
    number: int
    message: str
    is_at_fault: bool  # whether the client is


class Load(Struct, array_like=True):
    """How busy the engine is."""

    num_running: int = 0
    num_waiting: int = 0
    cache_use: float = 0.0  # of all positions, from 0 to 1


class News(_Message):
    updates: list[Update]
    load: Load


class Dropped(_Message):
    """A pass has failed, and took these with it."""

    numbers: list[int]
    reason: str


class Drain(_Message):
    """Finish what is in flight within so many seconds, and end."""

    seconds: float


class Ready(_Message):
    """Clients are heard."""


class Ask(_Message):
    number: int
    prompt_ids: list[int]
    params: SamplingParams
    pilot: str  # empty: the server's own


class Leave(_Message):
    """Nobody waits for this one any more."""

    number: int


FromEngine = Hello | Taken | Refused | News | Dropped | Drain
FromWeb = Ready | Ask | Leave
Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
decode_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_web = msgspec.msgpack.Decoder(FromWeb).decode


def pack(message: Any) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def receive(link: socket.socket) -> bytes | None:
    """The next frame's body; None when the other side is gone."""
    head = _receive_exactly(link, HEAD.size)
    return None if head is None else _receive_exactly(link, HEAD.unpack(head)[0])


def _receive_exactly(link: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            piece = link.recv(min(count - len(found), _AWAITED))
        except OSError:
            return None
        if not piece:
            return None
        found += piece
    return bytes(found)


class EngineEnd:
    """The engine's end of the wire."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="to the web side", daemon=True)
        self._writer.start()

    def send(self, message: FromEngine) -> None:
        """It never waits."""
        self._outgoing.put(pack(message))

    def messages(self) -> Iterator[FromWeb]:
        """Until the web side is gone."""
        while (body := receive(self._link)) is not None:
            yield decode_web(body)

    def close(self) -> None:
        """What was sent is written first."""
        self._outgoing.put(None)
        self._writer.join()
        self._link.close()

    def _write(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                self._link.sendall(frame)
            except OSError:  # nobody reads any more; whoever listens finds out
                return
