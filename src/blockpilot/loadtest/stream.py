"""One answer as it arrives: server-sent events cut out of bytes, and when each brought text.

No clock and no network in here: who feeds it says what time it is.
"""

from array import array
from typing import Any

import msgspec

from blockpilot.core.errors import InputError
from blockpilot.core.reading import Count, decode_json
from blockpilot.loadtest.records import Failure

MAX_EVENT = 4 << 20  # bytes
_LONGEST_MESSAGE = 300
_BROKEN_ENDS = ("error", "abort")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # of models that think before they answer
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        one = self.delta
        return bool(self.text or (one and (one.content or one.reasoning_content or one.reasoning or one.tool_calls)))


class _Usage(msgspec.Struct):
    completion_tokens: Count | None = None
    prompt_tokens: Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


class Stream:
    def __init__(self) -> None:
        self.chunk_times = array("d")
        self.failure: Failure | None = None
        self.finish_reason: str | None = None
        self.is_done = False  # the server said that nothing follows
        self.ended: float | None = None  # when its last event came
        self._usage = _Usage()
        self._rest = b""

    @property
    def has_usage(self) -> bool:
        return self._usage.completion_tokens is not None

    @property
    def num_tokens(self) -> int:
        """As the server counts; chunks, where it does not."""
        counted = self._usage.completion_tokens
        return len(self.chunk_times) if counted is None else counted

    @property
    def num_prompt_tokens(self) -> int | None:
        return self._usage.prompt_tokens

    def feed(self, data: bytes, now: float) -> None:
        """What has arrived by now; after the end or a failure nothing counts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read_line(line.strip(), now)
        if len(self._rest) > MAX_EVENT:
            self._fail("malformed event", f"an event is longer than {MAX_EVENT >> 20} MB")

    def close(self, now: float) -> None:
        """The server closed it, in order."""
        self.feed(b"\n", now)
        if self.finish_reason in _BROKEN_ENDS:
            self._fail(f"finish reason {self.finish_reason}", "")
        elif not self.is_done and self.finish_reason is None:
            self._fail("cut stream", "it ended before the answer did")
        elif self.finish_reason is None and not self.chunk_times:
            self._fail("no answer", "a stream without text or a finish reason")

    def _read_line(self, line: bytes, now: float) -> None:
        name, _, value = line.partition(b":")
        value = value.strip()
        if self.is_done or self.failure is not None or name not in (b"data", b"error") or not value:
            return  # other fields, comments that keep the connection alive
        if name == b"error":  # as llama.cpp does
            self._fail("error event", _message_in(value))
            return
        self.ended = now
        if value == b"[DONE]":
            self.is_done = True
            return
        try:
            event = decode_json(value, _Event, "event")
        except InputError as error:
            self._fail("malformed event", str(error))
            return
        self._take(event, now)

    def _take(self, event: _Event, now: float) -> None:
        if event.error is not None or event.object == "error":
            self._fail("error event", _text_of(event.error if event.error is not None else event.message))
            return
        if event.usage is not None and event.usage.completion_tokens is not None:
            self._usage = event.usage
        choices = event.choices or []
        if any(choice.has_text for choice in choices):
            self.chunk_times.append(now)
        for choice in choices:
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _fail(self, kind: str, message: str) -> None:
        if self.failure is None:
            self.failure = Failure(kind, message[:_LONGEST_MESSAGE])


def read_message(body: bytes) -> str:
    """What an answer that is no success says, in one line."""
    return _message_in(body)[:_LONGEST_MESSAGE]


def _message_in(body: bytes) -> str:
    try:
        found = decode_json(body, dict[str, Any], "body")
    except InputError:
        return " ".join(body.decode("utf-8", errors="replace").split())
    return _text_of(next((found[name] for name in ("error", "message", "detail") if found.get(name)), found))


def _text_of(error: Any) -> str:
    """Servers put the message into an object, or into an object within it, or send it plainly."""
    while isinstance(error, dict) and "message" in error:
        error = error["message"]
    return " ".join((error if isinstance(error, str) else str(error)).split())
