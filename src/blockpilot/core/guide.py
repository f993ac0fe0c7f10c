"""What an answer must look like: a JSON schema, any JSON object, a regular expression or a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockpilot.core.errors import InputError, show_value

MAX_CHARACTERS = 1 << 18
KINDS = ("json", "regex", "grammar")


@dataclass(frozen=True)
class Guide:
    """Tokens that the text cannot go on with are never emitted, under any pilot."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"a guide is one of {', '.join(KINDS)}, got {show_value(self.kind)}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise InputError(f"a guide's {self.kind} must be a text, got {show_value(self.text)}")
        if len(self.text) > MAX_CHARACTERS:
            raise InputError(f"a guide may have {MAX_CHARACTERS:,} characters, this has {len(self.text):,}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str = True) -> "Guide":
        """A JSON value that a schema allows; without one any object."""
        if schema is True:
            schema = {"type": "object"}
        if isinstance(schema, str):
            return cls("json", schema)
        try:
            return cls("json", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the schema is no JSON: {' '.join(str(error).split())[:200]}") from error

    @classmethod
    def regex(cls, pattern: str) -> "Guide":
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, rules: str) -> "Guide":
        """In the Lark form that llguidance reads."""
        return cls("grammar", rules)
