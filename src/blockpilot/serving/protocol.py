"""What clients may say: the OpenAI protocol, as far as it is about text, and a few fields of our own.

Every field is typed. A field that is not known here, or is known and not supported, is refused by its name: an option
that is silently dropped gives answers that nobody asked for.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from blockpilot.serving.errors import bad_request

MAX_CHOICES, MAX_MESSAGES = 16, 4096
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # for the provider's own books
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that may be there with these values alone
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "tools": ([], None),
    "functions": ([], None),
    "tool_choice": ("none", "auto", None),
    "function_call": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "modalities": (["text"], None),
    "echo": (False, None),
    "suffix": ("", None),
    "best_of": (1, None),
    "logit_bias": ({}, None),
}
_ASKED = _NEUTRAL.keys() - {"logit_bias"}


class TextPart(Struct):
    type: Literal["text"]
    text: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Struct):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Struct):
    schema: dict[str, Any] = {}
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class OwnOptions(Struct, forbid_unknown_fields=True):
    pilot: str | None = None  # a name, never a path
    timings: bool = False  # every step: draft size, nodes, accepted, milliseconds
    trees: bool = False  # and what it asked the target to check


class Asked(Struct, kw_only=True):
    """What both kinds of calls have."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    blockpilot: OwnOptions | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1


class ChatCall(Asked, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionCall(Asked, kw_only=True):
    prompt: Any  # a text, token ids, or a list of either
    logprobs: int | None = None


class TokenizeCall(Struct, kw_only=True):
    """Of a text, or of a conversation as the model would read it."""

    prompt: str | None = None
    content: str | None = None  # as llama.cpp names it
    messages: list[Message] | None = None
    model: str | None = None


class DetokenizeCall(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


Call = TypeVar("Call", bound=Struct)


def read_call(body: bytes, kind: type[Call]) -> Call:
    """The call in a body, or an error that names the field."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("the body is not valid JSON") from error
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object")
    _require_known(values, kind)
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        what, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$").removeprefix(".") or None
        if param is None and "required field" in what:
            param = what.split("`")[-2]
        raise bad_request(f"{param}: {what.replace('`', '')}" if param else what.replace("`", ""), param) from error


def _require_known(values: dict[str, Any], kind: type[Struct]) -> None:
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _ASKED or value not in _NEUTRAL[name]:
            raise bad_request(f"{name[:80]} is not supported", name[:80])
