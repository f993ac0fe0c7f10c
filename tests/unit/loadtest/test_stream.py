"""Answers as they arrive: however bytes are cut, the same text, the same times, the same end."""

import json
import random
from typing import Any

import pytest

from blockpilot.loadtest.stream import MAX_EVENT, Stream, read_message


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


OPENING = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})
DONE = b"data: [DONE]\n\n"
WHOLE = [OPENING, chunk("wör"), b": still here\n\n", chunk("ld"), chunk("", "stop"), USAGE, DONE]


def read(pieces: list[bytes]) -> Stream:
    stream = Stream()
    for now, piece in enumerate(pieces, start=1):
        stream.feed(piece, float(now))
    stream.close(float(len(pieces) + 1))
    return stream


def test_a_whole_answer() -> None:
    stream = read(WHOLE)
    assert stream.failure is None and stream.is_done and stream.finish_reason == "stop"
    assert list(stream.chunk_times) == [2.0, 4.0] and stream.ended == 7.0
    assert (stream.num_tokens, stream.num_prompt_tokens, stream.has_usage) == (5, 7, True)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("seed", range(8))
def test_bytes_may_be_cut_anywhere(seed: int, line_end: bytes) -> None:
    data, source = b"".join(WHOLE).replace(b"\n", line_end), random.Random(seed)
    cuts = sorted(source.sample(range(1, len(data)), 40)) if seed else list(range(1, len(data)))  # seed 0: every byte
    stream = read([data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    assert stream.failure is None and stream.is_done and stream.finish_reason == "stop"
    assert (len(stream.chunk_times), stream.num_tokens) == (2, 5)
    assert list(stream.chunk_times) == sorted(stream.chunk_times)


def test_without_usage_chunks_are_counted() -> None:
    stream = read([chunk("a"), chunk("b"), chunk("c", "length"), DONE])
    assert (stream.num_tokens, stream.num_prompt_tokens, stream.has_usage) == (3, None, False)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"content": "x"}]
)
def test_what_counts_as_text(delta: dict[str, Any]) -> None:
    assert len(read([event(choices=[{"delta": delta, "finish_reason": "stop"}]), DONE]).chunk_times) == 1


def test_plain_completions_have_text() -> None:
    stream = read([event(choices=[{"text": "a", "finish_reason": None}]), event(choices=[{"text": "b"}]), DONE])
    assert stream.failure is None and len(stream.chunk_times) == 2


def test_servers_that_send_no_end_mark() -> None:
    assert read([chunk("a"), chunk("b", "stop")]).failure is None
    assert read([chunk("a"), b"data: [DONE]"]).is_done  # nor the last line's end


BROKEN = [
    ([chunk("a")], "cut stream"),
    ([], "cut stream"),
    ([chunk("a"), chunk("", "abort"), DONE], "finish reason abort"),
    ([chunk("a"), chunk("", "error"), DONE], "finish reason error"),
    ([DONE], "no answer"),
    ([chunk("a"), b"data: {\n\n", chunk("", "stop"), DONE], "malformed event"),
    ([b'data: {"choices": 5}\n\n', DONE], "malformed event"),
    ([b'data: {"usage": {"completion_tokens": -1}}\n\n', DONE], "malformed event"),
    ([chunk("a"), event(error={"message": "a pass failed", "code": None}), DONE], "error event"),
    ([event(object="error", message="too long"), DONE], "error event"),
    ([b'error: {"message": "slot lost"}\n\n'], "error event"),
    ([b"data: " + b"x" * (MAX_EVENT + 1)], "malformed event"),
]


@pytest.mark.parametrize(("pieces", "kind"), BROKEN, ids=[f"{number}-{one[1]}" for number, one in enumerate(BROKEN)])
def test_broken_answers_are_told_apart(pieces: list[bytes], kind: str) -> None:
    failure = read(pieces).failure
    assert failure is not None and failure.kind == kind
    assert "\n" not in str(failure) and len(str(failure)) < 400


def test_after_a_failure_nothing_counts() -> None:
    stream = read([chunk("a"), event(error="no memory"), chunk("b", "stop"), USAGE, DONE])
    assert str(stream.failure) == "error event: no memory"
    assert len(stream.chunk_times) == 1 and stream.finish_reason is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "plainly"}', "plainly"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"object": "error", "message": "of old servers"}', "of old servers"),
        (b"<html>\n bad  gateway</html>", "<html> bad gateway</html>"),
        (b"", ""),
        (b"\xff\xfe", "��"),
    ],
)
def test_what_a_refusal_says(body: bytes, message: str) -> None:
    assert read_message(body) == message
