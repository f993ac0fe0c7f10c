"""The server over a tiny model: what it answers is what the engine writes, and bad calls are refused by name."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from blockpilot import LLM, SamplingParams
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.serving.settings import ServeConfig
from tests.tiny import make_dflash, make_llm
from tests.unit.serving.joined import joined

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), context_length=512, reuses_prefixes=True)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    expected = llm.generate("hello", SamplingParams(max_new_tokens=12, ignore_eos=True), pilot="ar")
    with (
        joined(llm, ServeConfig(model_name="tiny", max_queue=4)) as server,
        TestClient(server.app(), raise_server_exceptions=False) as found,
    ):
        found.expected = expected  # type: ignore[attr-defined]
        yield found


def post(client: TestClient, path: str = "/v1/chat/completions", **changes: Any) -> Any:
    base = CHAT if "chat" in path else {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return client.post(path, json={**base, **changes})


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("pilot", [None, "ar", "fixed:4", "tree:9"])
def test_a_chat_is_answered_as_the_engine_does(client: TestClient, pilot: str | None) -> None:
    found = post(client, blockpilot=None if pilot is None else {"pilot": pilot, "timings": True})
    assert found.status_code == 200
    body = found.json()
    expected = client.expected  # type: ignore[attr-defined]
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 12 and body["usage"]["prompt_tokens"] == expected.num_prompt_tokens
    if pilot is not None:
        timings = body["timings"][0]
        assert 1 + sum(step["emitted"] for step in timings["steps"]) == len(timings["tokens"]) == 12
        assert "".join(timings["tokens"]) == expected.text


@pytest.mark.parametrize("pilot", ["ar", "fixed:4", "tree:9"])
def test_trees_are_shown_on_request(client: TestClient, pilot: str) -> None:
    body = post(client, blockpilot={"pilot": pilot, "trees": True}).json()
    assert body["choices"][0]["message"]["content"] == client.expected.text  # type: ignore[attr-defined]
    steps = body["timings"][0]["steps"]
    assert steps and all(len(step["tree"]["tokens"]) == step["checked"] for step in steps)
    for step in steps[:-1]:
        tree = step["tree"]
        assert len(tree["parents"]) == len(tree["probabilities"]) == step["checked"]
        assert len(tree["accepted"]) == step["emitted"] and tree["accepted"][0] == 0
        assert all(tree["parents"][node] == before for before, node in itertools.pairwise(tree["accepted"]))
        assert all(0 <= value <= 1 for value in tree["probabilities"][1:])
    assert "tree" not in post(client, blockpilot={"timings": True}).json()["timings"][0]["steps"][0]


def test_calls_that_name_no_pilot_get_the_servers_own() -> None:
    llm = make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), context_length=128)
    llm.pilot = FixedPilot(4)
    with joined(llm, ServeConfig(model_name="tiny")) as server, TestClient(server.app()) as client:
        steps = post(client, blockpilot={"timings": True}).json()["timings"][0]["steps"]
    assert all(step["draft_size"] == 4 for step in steps[:-1])  # the last one has less room


@pytest.mark.parametrize("has_drafter", [True, False])
def test_pilots_that_weigh_costs_never_wait_for_the_engine(has_drafter: bool) -> None:
    llm = make_llm("bytes-int8", drafter=make_dflash("bytes-int8") if has_drafter else None, context_length=128)
    with joined(llm, ServeConfig(model_name="tiny")) as server, TestClient(server.app()) as client:
        assert post(client, blockpilot={"pilot": "auto"}).status_code == 200
        for pilot in ("step", "chain-step"):
            assert post(client, blockpilot={"pilot": pilot}).status_code == (200 if has_drafter else 400)


def test_a_stream_adds_up(client: TestClient) -> None:
    found = post(client, stream=True, stream_options={"include_usage": True}, blockpilot={"timings": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    chunks = events(found)
    expected = client.expected  # type: ignore[attr-defined]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[1:-1]]
    assert "".join(deltas) == expected.text
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert 1 + sum(step["emitted"] for chunk in chunks[1:-1] for step in chunk["timings"]["steps"]) == 12
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_choices_have_seeds_of_their_own(client: TestClient) -> None:
    body = post(client, n=3, temperature=1.0, seed=5).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    second = post(client, temperature=1.0, seed=6).json()["choices"][0]["message"]["content"]
    assert second == texts[1]
    chunks = events(post(client, n=3, temperature=1.0, seed=5, stream=True))
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert streamed == texts


def test_completions_take_texts_and_tokens(client: TestClient, llm: LLM) -> None:
    text = post(client, "/v1/completions").json()["choices"][0]["text"]
    ids = llm.tokenizer.encode("hello")
    assert post(client, "/v1/completions", prompt=ids).json()["choices"][0]["text"] == text
    both = post(client, "/v1/completions", prompt=["hello", "abc"], n=2).json()
    assert [choice["text"] == text for choice in both["choices"]][:2] == [True, True] and len(both["choices"]) == 4
    assert post(client, "/v1/completions", logprobs=2).json()["choices"][0]["logprobs"]["token_logprobs"][0] < 0


def test_log_probabilities_and_penalties_pass_through(client: TestClient) -> None:
    body = post(client, logprobs=True, top_logprobs=2, presence_penalty=1.5, logit_bias={"83": -100}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(one["top_logprobs"]) == 2 for one in content)
    assert body["choices"][0]["message"]["content"] != client.expected.text  # type: ignore[attr-defined]


def test_structured_answers(client: TestClient, llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ends = {str(token_id): 100 for token_id in llm.tokenizer.encode('"}')}  # a random model would write spaces for ever
    asked = {"response_format": wanted, "ignore_eos": False, "max_tokens": 99, "logit_bias": ends, "temperature": 1}
    body = post(client, **asked, seed=1).json()
    assert json.loads(body["choices"][0]["message"]["content"]) in ({"a": 1}, {"a": 2})
    assert body["choices"][0]["finish_reason"] == "stop"


def test_the_next_turn_is_not_read_again(client: TestClient) -> None:
    first = post(client, messages=[{"role": "user", "content": "a long question, " * 3}]).json()
    answer = first["choices"][0]["message"]["content"]
    turns = [{"role": "user", "content": "a long question, " * 3}, {"role": "assistant", "content": answer}]
    second = post(client, messages=[*turns, {"role": "user", "content": "and now?"}]).json()
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused >= first["usage"]["prompt_tokens"] + 10


def test_what_others_have_asked_does_not_change_how_a_text_is_cut(client: TestClient, llm: LLM) -> None:
    """An answer may end where a token of the next text would go on: `hell` and then `o`."""
    for before in ("hell", "he", "hello"):
        post(
            client, "/v1/completions", prompt=before, max_tokens=1, logit_bias={str(llm.tokenizer.encode("l")[0]): 100}
        )
    for text in ("hello there", "hell", "hellllo", "he l"):
        body = post(client, "/v1/completions", prompt=text).json()
        ids = llm.tokenizer.encode(text)
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert body == post(client, "/v1/completions", prompt=ids).json() | {
            name: body[name] for name in ("id", "created", "usage")
        }


def test_any_pilot_may_be_named_whatever_the_server_has_begun_with(client: TestClient) -> None:
    for pilot in ("auto", "step", "chain-step", "fixed:3"):
        found = post(client, blockpilot={"pilot": pilot}).json()
        assert found["choices"][0]["message"]["content"] == client.expected.text  # type: ignore[attr-defined]


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": "hi"}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"max_tokens": 0}, "max_new_tokens"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"stop": [5]}, "stop[0]"),
    ({"seed": -5.5}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, None),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"echo": True}, "echo"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "ignore_eos": False}, None),
    ({"blockpilot": {"pilot": "/etc"}}, "blockpilot"),
    ({"blockpilot": {"pilot": "prefill:/tmp"}}, "blockpilot"),
    ({"blockpilot": {"speed": 9}}, "blockpilot"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, None),
]


@pytest.mark.parametrize(("changes", "param"), BAD, ids=[str(one[0])[:60] for one in BAD])
def test_bad_calls_are_refused_by_name(client: TestClient, changes: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        found = post(client, **changes, stream=stream)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert error["param"] == param, error
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"a": "\\ud800"}']
)
def test_bodies_that_are_no_calls(client: TestClient, body: bytes) -> None:
    found = client.post("/v1/chat/completions", content=body)
    assert found.status_code == 400 and "error" in found.json()


def test_other_paths_models_and_hosts(client: TestClient) -> None:
    assert post(client, model="gpt-9").status_code == 404
    assert post(client, model="gpt-9").json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/nothing").json()["error"]["message"]
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 400
    assert "access-control-allow-origin" not in client.get("/health", headers={"origin": "https://a.example"}).headers
    assert client.post("/v1/chat/completions", content=b"x" * (9 << 20)).status_code == 413


def test_small_endpoints(client: TestClient, llm: LLM) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    tokens = client.post("/tokenize", json={"prompt": "hello"}).json()
    assert tokens["tokens"] == llm.tokenizer.encode("hello") and tokens["count"] == len(tokens["tokens"])
    assert client.post("/tokenize", json={"messages": MESSAGES}).json()["count"] > tokens["count"]
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "hello"
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert client.get("/props").json()["total_slots"] == 4
    assert "<title>BlockPilot</title>" in client.get("/").text


def test_metrics_count_what_was_answered(client: TestClient) -> None:
    def read(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    names = (
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds_count",
    )
    before = [read(name) for name in names]
    post(client, blockpilot={"pilot": "fixed:4"})
    after = [read(name) for name in names]
    assert after[0] == before[0] + 12 and after[1] > before[1] and after[2] == before[2] + 1
    assert read("num_requests_running") == 0


def test_keys_are_asked_for() -> None:
    llm = make_llm("bytes-int8", context_length=128)
    with joined(llm, ServeConfig(model_name="tiny", api_key="sesame")) as server, TestClient(server.app()) as client:
        assert post(client).status_code == 401
        assert post(client).json()["error"]["type"] == "authentication_error"
        assert (
            client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer wrong"}).status_code == 401
        )
        found = client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer sesame"})
        assert found.status_code == 200
        assert client.get("/health").status_code == 200


def test_a_full_queue_says_when_to_try_again(llm: LLM, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step

    def step_slowly() -> Any:
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(llm.engine, "step", step_slowly)
    results: list[int] = []
    headers: list[str | None] = []

    def ask() -> None:
        found = post(client, max_tokens=60)
        results.append(found.status_code)
        headers.append(found.headers.get("retry-after"))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(results) == {200, 429} and results.count(200) >= 8
    assert all((header is not None) == (status == 429) for header, status in zip(headers, results, strict=True))
    deadline = time.time() + 10
    while llm.engine.has_work and time.time() < deadline:
        time.sleep(0.01)
    assert llm.engine.runner.cache.num_free == 4
