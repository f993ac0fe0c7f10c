"""Chat templates: a conversation becomes the exact text the model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted code: it runs in Jinja's immutable sandbox,
with the same whitespace rules, functions and filters that the Hugging Face ecosystem offers to templates.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blockpilot.core.errors import InputError

Message = Mapping[str, str]


def compile_template(source: str) -> Template:
    """Parse a template once; a syntax error becomes one clear line."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise InputError(f"the model's chat template does not parse: {_one_line(error)}; use a raw prompt") from error


def render_template(template: Template, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """The conversation as text, ending where the assistant starts to speak."""
    variables = {"bos_token": "", "eos_token": ""} | dict(special_tokens)
    plain = [dict(message) for message in messages]
    try:
        # Qwen3 answers without its thinking part, which is how it is run with draft models
        return template.render(messages=plain, add_generation_prompt=True, enable_thinking=False, **variables)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"the model's chat template refused the conversation: {_one_line(error)}") from error


class _GenerationTag(Extension):
    """Some templates mark the assistant's words with {% generation %}; for rendering the tag means nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
