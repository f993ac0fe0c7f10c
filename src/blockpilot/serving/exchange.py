"""What the web side knows of the engine: the calls that are under way, their news, and how busy it is.

A call is one or more requests, its choices. Updates that a client has not taken yet are joined, so that a slow reader
gets fewer and larger pieces, and waits for nobody but itself.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from blockpilot.core.records import Completion, Update, join_updates
from blockpilot.serving.errors import ApiError, from_input_error_text
from blockpilot.serving.wire import (
    HEAD,
    Ask,
    Drain,
    Dropped,
    Leave,
    Load,
    News,
    Ready,
    Refused,
    Taken,
    decode_engine,
    pack,
)

_GONE = "the engine has ended"


@dataclass(eq=False)
class Choice:
    """One request of a call."""

    ask: Ask
    index: int
    is_taken: bool = False
    completion: Completion | None = None
    has_started: bool = False


@dataclass(eq=False)
class Call:
    choices: list[Choice]
    deadline: float
    max_seconds: float
    arrived: float = field(default_factory=time.perf_counter)
    failure: ApiError | None = None
    _pending: dict[int, list[Update]] = field(default_factory=dict)  # by index
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def accepted(self) -> None:
        """Until the engine has found nothing wrong with any of its requests."""
        while not all(choice.is_taken for choice in self.choices):
            await self._wait()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """By index of the choice, until all have finished."""
        num_open = len(self.choices)
        while num_open:
            while not self._pending:
                await self._wait()
            pending, self._pending = self._pending, {}
            for index, found in pending.items():
                update = join_updates(found)
                num_open -= update.completion is not None
                if update.completion is not None and update.completion.error:
                    raise ApiError(500, update.completion.error)
                yield index, update

    async def completions(self) -> list[Completion]:
        found = {index: update.completion async for index, update in self.updates()}
        return [completion for _, completion in sorted(found.items()) if completion is not None]

    def deliver(self, index: int, update: Update) -> None:
        self._pending.setdefault(index, []).append(update)
        self._changed.set()

    def take(self, choice: Choice) -> None:
        choice.is_taken = True
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        self.failure = self.failure or error
        self._changed.set()

    async def _wait(self) -> None:
        """For whatever comes next."""
        if self.failure is not None:
            raise self.failure
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._changed.wait()
        except TimeoutError as error:
            raise ApiError(408, f"no answer within {self.max_seconds:g} s", code="timeout") from error


class Exchange:
    def __init__(self, link: socket.socket, note: Callable[[Call, Choice, Update], None] | None = None) -> None:
        """`note` is told of every update when it comes."""
        self._link, self.note = link, note
        self.load = Load()
        self.is_draining = False
        self.when_drained: Callable[[float], None] = lambda seconds: None  # told how long what is in flight may take
        self._calls: dict[int, tuple[Call, Choice]] = {}  # by number of the request
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self._calls)

    @property
    def is_up(self) -> bool:
        return self._listener is not None and not self._listener.done()

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._listener = asyncio.create_task(self._listen(reader))
        self._writer.write(pack(Ready()))

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()

    def submit(self, asks: Sequence[Ask], max_seconds: float) -> Call:
        if not self.is_up:
            raise ApiError(503, _GONE)
        for ask in asks:
            ask.number = next(self._numbers)
        choices = [Choice(ask, index) for index, ask in enumerate(asks)]
        call = Call(choices, asyncio.get_running_loop().time() + max_seconds, max_seconds)
        for choice in choices:
            self._calls[choice.ask.number] = (call, choice)
            self._send(choice.ask)
        return call

    def leave(self, call: Call) -> None:
        """The client is gone, or has its answer."""
        for choice in call.choices:
            number = choice.ask.number
            if self._calls.pop(number, None) is not None:
                self._send(Leave(number))

    def end_all(self) -> None:
        """Whatever is in flight ends as aborted, with what has been written."""
        for number in self._calls:
            self._send(Leave(number))

    def _send(self, message: Ask | Leave) -> None:
        assert self._writer is not None
        self._writer.write(pack(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._heed(decode_engine(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for call, _ in list(self._calls.values()):
                call.fail(ApiError(503, _GONE))
            self.when_drained(0.0)

    def _heed(self, message: object) -> None:
        if isinstance(message, News):
            self.load = message.load
            for update in message.updates:
                self._deliver(update)
        elif isinstance(message, Taken):
            if message.number in self._calls:
                call, choice = self._calls[message.number]
                call.take(choice)
        elif isinstance(message, Refused):
            error = from_input_error_text(message.message) if message.is_at_fault else ApiError(500, message.message)
            self._fail([message.number], error)
        elif isinstance(message, Dropped):
            self._fail(message.numbers, ApiError(500, message.reason))
        elif isinstance(message, Drain):
            self.is_draining = True
            self.when_drained(message.seconds)

    def _deliver(self, update: Update) -> None:
        if (found := self._calls.get(update.request_id)) is None:
            return
        call, choice = found
        if self.note is not None:
            self.note(call, choice, update)
        choice.has_started, choice.completion = True, update.completion
        if update.completion is not None:
            del self._calls[update.request_id]
        call.deliver(choice.index, update)

    def _fail(self, numbers: Sequence[int], error: ApiError) -> None:
        for number in numbers:
            if (found := self._calls.pop(number, None)) is not None:
                found[0].fail(error)
