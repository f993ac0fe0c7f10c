"""What may be said of a server and of a load."""

import math
from typing import Any

import pytest

from blockpilot.core.errors import InputError
from blockpilot.loadtest.config import CallConfig, read_rate, read_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/api/v1", "https://example.org/api"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    config = CallConfig(url=read_url(text), endpoint="completions")
    assert config.url == url
    assert (config.call_url, config.models_url) == (f"{url}/v1/completions", f"{url}/v1/models")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://[::1",
        "http://a b",
        "http://ö",
        "http://127.0.0.1/?x=1",
        "http://key@127.0.0.1",
        "http://127.0.0.1/" + "x" * 3000,
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InputError, match="give an address such as") as caught:
        read_url(text)
    assert len(str(caught.value)) < 400


def test_rates() -> None:
    assert [read_rate(text) for text in ("2", "0.5", " inf ", "1e3")] == [2, 0.5, math.inf, 1000]
    for text in ("0", "-1", "nan", "x", "", "1_0", "1e9", "infinity", "1e-9"):
        with pytest.raises(ValueError):  # noqa: PT011 (the command line says what is wrong)
            read_rate(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_body": {"stream": False}},
        {"extra_body": {"n": 2}},
        {"extra_body": {"messages": []}},
        {"api_key": "a\nb"},
    ],
)
def test_what_a_measurement_rests_on(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        CallConfig(url="http://127.0.0.1", **changes)
