"""Any body to any endpoint of the server: an answer, or an error object with a status of the client's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from starlette.testclient import TestClient

from blockpilot.serving.protocol import ChatCall, CompletionCall
from blockpilot.serving.settings import ServeConfig
from tests.fuzz.profiles import fuzz
from tests.tiny import make_dflash, make_llm
from tests.unit.serving.joined import joined

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
FIELDS = sorted({*ChatCall.__struct_fields__, *CompletionCall.__struct_fields__, "tools", "echo", "store", "unheard"})
CALL = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"prompt": "hello", "max_tokens": 6, "temperature": 0}

_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from((2**31, 2**63, 2**64, -(2**63), 1e308, 5e-324, 0.5, -0.0, 10**30)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(
        ("auto", "ar", "tree:9", "fixed:4", "tree:-1", "fixed:999999", "../..", "json_object", "json_schema")
    ),
)
_KEYS = st.one_of(
    st.sampled_from(("role", "content", "type", "text", "json_schema", "schema", "pilot", "timings", "trees", "5")),
    st.text(max_size=3),
)
VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=9,
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    llm = make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), context_length=256, reuses_prefixes=True)
    with (
        joined(llm, ServeConfig(model_name="tiny", max_body=1 << 16)) as server,
        TestClient(server.app(), raise_server_exceptions=False) as found,
    ):
        found.plain = found.post(PATHS[0], json=CALL).json()["choices"]  # type: ignore[attr-defined]
        yield found


def require_sane(client: TestClient, path: str, body: bytes) -> None:
    found = client.post(path, content=body)
    assert found.status_code < 500, (body, found.text)
    if found.status_code == 200:
        return
    error = found.json()["error"]
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 2000
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}


@fuzz(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), share=8)
def test_any_value_of_any_field(client: TestClient, path: str, changes: dict[str, Any]) -> None:
    base = {PATHS[0]: CALL, PATHS[1]: COMPLETION}.get(path, {})
    values = base | {"max_tokens": 6} | changes if base else changes
    if isinstance(values.get("max_tokens"), int | float) and path in PATHS[:2]:
        values["max_tokens"] = min(values["max_tokens"], 20)  # long answers are no faults
    require_sane(client, path, json.dumps(values).encode())


@fuzz(st.sampled_from(PATHS), st.one_of(st.binary(max_size=60), VALUES.map(lambda value: json.dumps(value).encode())))
def test_any_body(client: TestClient, path: str, body: bytes) -> None:
    require_sane(client, path, body)


@fuzz(st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_damaged_calls(client: TestClient, place: int, junk: bytes) -> None:
    whole = json.dumps({**CALL, "response_format": {"type": "text"}, "stop": ["x"], "logit_bias": {"5": 1}}).encode()
    at = place % len(whole)
    require_sane(client, PATHS[0], whole[:at] + junk + whole[at + len(junk) :])


def test_the_server_is_well_afterwards(client: TestClient) -> None:
    assert client.post(PATHS[0], json=CALL).json()["choices"] == client.plain  # type: ignore[attr-defined]
    metrics = client.get("/metrics").text.splitlines()
    assert any(line.startswith("vllm:num_requests_running{") and line.endswith(" 0.0") for line in metrics)
