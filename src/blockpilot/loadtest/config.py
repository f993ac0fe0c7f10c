"""What a load test does: the calls, the loads, and the limits that answers are judged by."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from blockpilot.core.errors import InputError

Endpoint = Literal["chat", "completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions")
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OURS = ("stream", "stream_options", "messages", "prompt")  # fields that a measurement rests on
_LONGEST_URL = 2000


@dataclass(frozen=True)
class Load:
    """Requests per second (open loop), or clients that wait for their answers (closed loop)."""

    rate: float | None = None  # inf: all at once
    concurrency: int | None = None

    @property
    def name(self) -> str:
        return f"rate {self.rate:g}" if self.rate is not None else f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Limits:
    """Milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def are_given(self) -> bool:
        return self.ttft is not None or self.tpot is not None


@dataclass(frozen=True, kw_only=True)
class CallConfig:
    """What every request says, and to whom."""

    url: str  # as `read_url` returns it
    endpoint: Endpoint = "chat"
    model: str = ""
    api_key: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0  # of the first request; that of the next one is one more
    ignores_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0  # seconds of a whole answer

    def __post_init__(self) -> None:
        for name in _OURS:
            if name in self.extra_body:
                raise InputError(f"--extra-body: the load test sets {name} itself: leave it out")
        if self.extra_body.get("n", 1) != 1:
            raise InputError("--extra-body: n must be 1: an answer with several choices has no time per token")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("the API key holds characters that no HTTP header may have: check it")

    @property
    def call_url(self) -> str:
        return self.url + _PATHS[self.endpoint]

    @property
    def models_url(self) -> str:
        return f"{self.url}/v1/models"

    def body(self, messages: list[dict[str, Any]], seed: int) -> dict[str, Any]:
        """Of one call; `extra_body` has the last word."""
        asked: dict[str, Any] = {"messages": messages}
        if self.endpoint == "completions":
            asked = {"prompt": messages[0]["content"]}
        found = {"model": self.model, **asked, "max_tokens": self.max_tokens, "temperature": self.temperature}
        found |= {"seed": seed, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            found["ignore_eos"] = True
        return found | self.extra_body


def read_url(text: str) -> str:
    """A server's address, with or without /v1, as the part that paths are put behind."""
    advice = f"--url {text[:200]!r}: give an address such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(text)
        is_usable = _is_usable(parts) and len(text) <= _LONGEST_URL and text.isascii() and text.isprintable()
    except ValueError as error:  # a port or a bracket that is none
        raise InputError(advice) from error
    if not is_usable or " " in text:
        raise InputError(advice)
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError(f"{advice}; a key goes in with --api-key")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_usable(parts: SplitResult) -> bool:
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0


def read_rate(text: str) -> float:
    """Of arrivals per second; ValueError where it is none that anybody could wait for, or send."""
    rate = math.inf if text.strip() == "inf" else float(text)
    if "_" in text or not text.isascii() or not rate >= 1e-3 or (rate > 1e5 and text.strip() != "inf"):
        raise ValueError(text)
    return rate
