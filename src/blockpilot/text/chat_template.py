"""Chat templates: a conversation becomes the exact text the model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted code: it runs in Jinja's immutable sandbox
with bounds on its work and its text (`template_bounds.py`), with the same whitespace rules, functions and filters that
the Hugging Face ecosystem offers to templates.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError

from blockpilot.core.errors import InputError
from blockpilot.text.template_bounds import MAX_SOURCE, BoundedEnvironment

Message = Mapping[str, str]
# What a program may raise that nobody has tried before. RecursionError: macros that call themselves
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Parse a template once; a syntax error becomes one clear line."""
        if len(source) > MAX_SOURCE:
            raise InputError(f"the model's chat template has {len(source):,} characters: use a raw prompt")
        self._environment = environment = BoundedEnvironment()
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _format_now
        self._lock = threading.Lock()  # the environment counts the work of one rendering
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:  # the last two: nested too deeply
            raise InputError(
                f"the model's chat template does not parse: {_one_line(error)}; use a raw prompt"
            ) from error

    def render(self, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
        """The conversation as text, ending where the assistant starts to speak."""
        variables: dict[str, Any] = {"bos_token": "", "eos_token": ""} | dict(special_tokens)
        variables["messages"] = [dict(message) for message in messages]
        try:
            with self._lock:
                self._environment.start(variables)
                # Qwen3 answers without its thinking part, which is how it is run with draft models
                return self._template.render(add_generation_prompt=True, enable_thinking=False, **variables)
        except _FAILURES as error:
            raise InputError(f"the model's chat template refused the conversation: {_one_line(error)}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` offers it. Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
