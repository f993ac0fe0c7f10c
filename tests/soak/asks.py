"""What is asked, drawn at random: a call, what its client does with the answer, and what must come of it."""

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

Manner = Literal["whole", "stream", "turns", "slow", "leave", "deaf", "half", "bad"]
MANNERS: dict[Manner, int] = {
    "whole": 28,
    "stream": 38,
    "turns": 6,
    "slow": 3,
    "leave": 14,
    "deaf": 1,
    "half": 2,
    "bad": 8,
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TEXT = "hello world 12 the a of {} is not known yet, and nobody asks why ö 日本"
WORDS = (*_TEXT.split(), "\n")
PILOTS = (None, "ar", "auto", "step", "chain-step", "fixed:2", "fixed:4", "fixed:8", "tree:3", "tree:9", "tree:15@6")
SYSTEM = "You answer as shortly as you can, and you never say what you do not know. "
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "integer"}}},
    },
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
)
_VOCABULARY = 262  # of the tiny model's tokens, without its padding


@dataclass(frozen=True)
class Ask:
    number: int
    path: str
    body: bytes
    manner: Manner
    statuses: tuple[int, ...] = (200,)
    pause: float = 0.0  # of a slow reader between its reads, of others before they leave

    @property
    def call(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


def draw_ask(seed: int, number: int) -> Ask:
    """From the seed and the number alone."""
    source = random.Random(f"{seed}-{number}")
    manner = source.choices(list(MANNERS), list(MANNERS.values()))[0]
    if manner == "bad":
        return _draw_bad(source, number)
    path = CHAT if manner == "turns" else source.choice((CHAT, COMPLETIONS))
    call = _draw_call(source, path)
    if manner == "turns":  # texts with stop strings are not remembered
        call = {name: value for name, value in call.items() if name not in ("n", "stop", "response_format")}
    if manner in ("stream", "slow", "deaf") or (manner == "leave" and source.random() < 0.7):
        call["stream"] = True
        call["stream_options"] = {"include_usage": True}
    if manner in ("leave", "deaf", "slow"):  # enough to be in the middle of
        call |= {"max_tokens": source.choice((60, 200, 400)), "ignore_eos": "response_format" not in call}
    pause = source.uniform(0.5, 2) if manner == "deaf" else source.choice((0.0, 0.002, 0.01, 0.05))
    return Ask(number, path, json.dumps(call).encode(), manner, pause=pause)


def _draw_call(source: random.Random, path: str) -> dict[str, Any]:
    call: dict[str, Any] = {"model": "tiny", "seed": source.randrange(2**40)}
    if path == CHAT:
        system = [{"role": "system", "content": SYSTEM}] if source.random() < 0.5 else []
        call["messages"] = [*system, {"role": "user", "content": _draw_text(source)}]
    else:
        call["prompt"] = source.choice((_draw_text, _draw_ids))(source)
    call["max_tokens"] = source.choice((1, 2, 5, 16, 24, 40, 80))
    call |= _draw_sampling(source)
    if source.random() < 0.15:
        call["n"] = source.choice((2, 3, 4, 16))
    if source.random() < 0.25:
        call["stop"] = source.choice(("e", ["a", "\n"], "th", [chr(65 + source.randrange(26))]))
    if (pilot := source.choice(PILOTS)) is not None:
        call["blockpilot"] = {"pilot": pilot} | ({"timings": True} if source.random() < 0.1 else {})
    if source.random() < 0.1:
        call |= {"logprobs": True, "top_logprobs": source.randrange(4)} if path == CHAT else {"logprobs": 2}
    if source.random() < 0.12:
        call["response_format"] = _draw_format(source)
    elif source.random() < 0.5:
        call["ignore_eos"] = True
    return call


def _draw_sampling(source: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": source.choice((0, 0, 0.3, 0.7, 1.0, 1.5))}
    for name, share, values in (
        ("top_p", 0.2, (0.5, 0.9, 1.0)),
        ("top_k", 0.2, (1, 5, 40)),
        ("min_p", 0.15, (0.02, 0.3)),
        ("presence_penalty", 0.1, (-1.0, 0.5, 2.0)),
        ("frequency_penalty", 0.1, (-0.5, 1.0)),
        ("repetition_penalty", 0.1, (0.8, 1.2)),
    ):
        if source.random() < share:
            found[name] = source.choice(values)
    if source.random() < 0.1:
        tokens = source.sample(range(_VOCABULARY), 4)
        found["logit_bias"] = {str(token_id): source.choice((-100, -5, 5)) for token_id in tokens}
    return found


def _draw_text(source: random.Random) -> str:
    return " ".join(source.choice(WORDS) for _ in range(source.randint(1, 30)))


def _draw_ids(source: random.Random) -> list[int]:
    """Some begin alike, so that what was read for one serves another."""
    shared = random.Random(source.randrange(4))
    beginning = [shared.randrange(3, _VOCABULARY) for _ in range(source.choice((0, 20, 50)))]
    return [*beginning, *(source.randrange(3, _VOCABULARY) for _ in range(source.randint(1, 40)))]


def _draw_format(source: random.Random) -> dict[str, Any]:
    if source.random() < 0.3:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": source.choice(SCHEMAS)}}


def _draw_bad(source: random.Random, number: int) -> Ask:
    path = source.choice((CHAT, COMPLETIONS))
    call = _draw_call(source, path)
    kind = source.randrange(6)
    if kind == 0:
        changed = source.choice(
            (
                {"temperature": -1},
                {"top_p": 7},
                {"n": 99},
                {"unheard_of": 1},
                {"max_tokens": 0},
                {"stop": 5},
                {"seed": "x"},
            )
        )
        return Ask(number, path, json.dumps(call | changed).encode(), "bad", (400,))
    if kind == 1:
        body = json.dumps(call).encode()
        return Ask(number, path, body[: source.randrange(len(body))], "bad", (400,))
    if kind == 2:
        return Ask(number, path, json.dumps(call | {"model": "gpt-9"}).encode(), "bad", (404,))
    if kind == 3:
        return Ask(number, path, b"x" * (300 << 10), "bad", (413,))
    if kind == 4:
        return Ask(number, path, source.randbytes(source.randrange(400)), "bad", (400,))
    long = {"messages": [{"role": "user", "content": "x" * 5000}]} if path == CHAT else {"prompt": "x" * 5000}
    return Ask(number, path, json.dumps(call | long).encode(), "bad", (400,))
