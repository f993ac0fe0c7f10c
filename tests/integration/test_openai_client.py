"""A client that nobody here wrote, the package `openai`, against our server: calls, streams, errors, limits."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.soak.process import ServerProcess, running_server

openai = pytest.importorskip("openai", reason="needs the package openai: pip install openai")
pydantic = pytest.importorskip("pydantic")
KEY = "sesame"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
USUAL: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=30) as found:
        yield found


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 10
    while (running := server.gauge("vllm:num_requests_running")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running == 0


def test_chats(client: Any) -> None:
    found = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **USUAL)
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert found.usage.completion_tokens == 12 and found.usage.total_tokens == 12 + found.usage.prompt_tokens
    assert found.object == "chat.completion" and found.model == "tiny" and found.created > 1e9
    newer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **USUAL)
    assert newer.choices[0].message.content == choice.message.content


def test_streams_with_usage(client: Any) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=20, **USUAL)
    options = {"include_usage": True}
    asked = {"messages": MESSAGES, "max_tokens": 20, "stream": True, "stream_options": options}
    chunks = list(client.chat.completions.create(**asked, **USUAL))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_streaming_helper(client: Any) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=20, **USUAL).choices[0].message.content
    with client.chat.completions.stream(messages=MESSAGES, max_tokens=99, stop=whole[-2:], **USUAL) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == whole[: whole.index(whole[-2:])] != ""


def test_several_choices(client: Any) -> None:
    asked = USUAL | {"temperature": 1, "seed": 3}
    found = client.chat.completions.create(messages=MESSAGES, n=2, max_tokens=12, **asked)
    texts = [choice.message.content for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1] and texts[0] != texts[1]
    assert found.usage.completion_tokens == 24
    streamed = ["", ""]
    for chunk in client.chat.completions.create(messages=MESSAGES, n=2, max_tokens=12, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_log_probabilities(client: Any) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**asked, **USUAL).choices[0].logprobs.content
    assert len(content) == 6 and all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in content)
    assert all(one.token == one.top_logprobs[0].token for one in content)  # greedy
    streamed = [
        one
        for chunk in client.chat.completions.create(**asked, stream=True, **USUAL)
        for choice in chunk.choices
        if choice.logprobs is not None
        for one in choice.logprobs.content
    ]
    assert streamed == content


def test_completions_take_texts_and_lists(client: Any) -> None:
    found = client.completions.create(prompt=["hello", "abc"], max_tokens=5, logprobs=1, **USUAL)
    assert [choice.index for choice in found.choices] == [0, 1] and found.object == "text_completion"
    assert len(found.choices[0].logprobs.tokens) == 5
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="abc", max_tokens=5, stream=True, **USUAL)
    )
    assert text == found.choices[1].text


class Verdict(pydantic.BaseModel):
    is_prime: bool
    kind: Literal["even", "odd"]


def test_answers_of_a_type(client: Any, server: ServerProcess) -> None:
    """A random model would write spaces for ever: a bias ends what may end."""
    ids = json.loads(server.post("/tokenize", {"prompt": '"}tfeo'}))["tokens"]
    bias = {str(token_id): 30 for token_id in ids}
    found = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Verdict, max_tokens=200, logit_bias=bias, temperature=0
    )
    assert isinstance(found.choices[0].message.parsed, Verdict) and found.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Verdict, max_tokens=2)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "blockpilot")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_errors_have_their_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p") as bad:
        client.chat.completions.create(messages=MESSAGES, top_p=7, **USUAL)
    assert bad.value.param == "top_p" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="tokens and the context holds"):
        client.chat.completions.create(messages=[{"role": "user", "content": "x" * 5000}], **USUAL)
    with pytest.raises(openai.NotFoundError, match="is not served here") as missing:
        client.chat.completions.create(messages=MESSAGES, **(USUAL | {"model": "gpt-9"}))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="tools"):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        client.chat.completions.create(messages=MESSAGES, tools=tools, **USUAL)


def test_a_full_queue(server: ServerProcess) -> None:
    """Without the client's own patience a full queue is an error of its class; with it the answer comes."""

    async def ask(max_retries: int) -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=max_retries, timeout=60) as client:
            asked = {"messages": MESSAGES, "max_tokens": 400, "n": 16}
            calls = [client.chat.completions.create(**asked, **USUAL) for _ in range(6)]
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(ask(0))
    refused = [one for one in found if isinstance(one, openai.RateLimitError)]
    assert refused and len(refused) < 6 and all(one.response.headers["retry-after"] for one in refused)
    assert all(hasattr(one, "choices") for one in found if one not in refused)
    assert all(hasattr(one, "choices") for one in asyncio.run(ask(8)))
    wait_until_idle(server)


def test_timeouts_and_streams_that_are_left(client: Any, server: ServerProcess) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).chat.completions.create(messages=MESSAGES, n=16, max_tokens=400, **USUAL)
    stream = client.chat.completions.create(messages=MESSAGES, n=16, max_tokens=400, stream=True, **USUAL)
    assert next(iter(stream)).choices
    stream.close()
    wait_until_idle(server)
    assert client.chat.completions.create(messages=MESSAGES, max_tokens=2, **USUAL).choices


def test_the_key_is_also_read_from_the_environment(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    assert os.environ["OPENAI_API_KEY"] and openai.OpenAI().models.list().data
