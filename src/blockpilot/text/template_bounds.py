"""Jinja with bounds: a template that comes with a model may loop for ever or ask for gigabytes.

Jinja's sandbox keeps a template away from Python's insides, but not from the machine's time and memory. Here every
round of a loop and every call counts as work and looks at the clock, every value is measured when it is made, and what
makes much out of little (repetition, padding, powers, formats) is refused before it is made. Filters and methods that
chat templates have no use for are left out.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 100_000  # characters of a template
_MAX_SIZE = 1 << 22  # characters and items of one value; what it is given comes on top, four times
_MAX_PRODUCED = 1 << 27  # of all values together
_ITEM = 16  # what an item weighs, beside characters
_MAX_WORK = 1 << 20  # rounds of loops and calls
_MAX_SECONDS = 1.0
_MAX_NUMBER = 10_000  # as an argument: a width, a count
_MAX_INDENT = 32
_MAX_BITS = 4096  # of a product or a power
_LEFT_OUT = ("format", "pprint", "random", "urlize", "wordwrap", "xmlattr", "filesizeformat")
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(dir(str)) - {"translate", "maketrans", "encode", "format_map", "expandtabs"},
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
}
_WIDE_FORMAT = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*|\{[^{}]*\{")  # long widths, and widths that come as arguments


class TemplateBoundError(TemplateError):
    """The template asks for more work or memory than a chat template needs."""


class _Meter:
    """What one rendering has used."""

    def __init__(self, given: int = 0) -> None:
        self.max_size, self.left = _MAX_SIZE + 4 * given, _MAX_PRODUCED + 64 * given
        self.work_left, self.deadline = _MAX_WORK, time.thread_time() + _MAX_SECONDS

    def tick(self) -> None:
        self.work_left -= 1
        if self.work_left < 0 or time.thread_time() > self.deadline:
            raise TemplateBoundError("it takes too long")

    def allow(self, size: int) -> None:
        """Before something of that size is made."""
        if size > self.max_size:
            raise TemplateBoundError("it makes too much text")

    def count(self, value: Any) -> Any:
        size = len(value) if isinstance(value, str) else self.measure(value)
        self.allow(size)
        self.left -= size
        if self.left < 0:
            raise TemplateBoundError("it makes too much text")
        return value

    def measure(self, value: Any) -> int:
        """Characters and items of a value and all that is in it, as far as it matters."""
        size, todo = 0, [value]
        while todo and size <= self.max_size:
            one = todo.pop()
            size += _ITEM
            if isinstance(one, str | bytes | range):
                size += len(one)
            elif isinstance(one, Mapping):
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                todo += one
            elif isinstance(one, int):
                size += one.bit_length() // 4
        return size


class _BoundsTransformer(NodeTransformer):
    """Puts the environment's checks around what makes values without a call, and around what is looped over."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _call("bounded_rounds", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("bounded_text", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("bounded_value", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("bounded_value", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("bounded_value", [node])


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    found = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    return found.set_lineno(arguments[0].lineno if arguments else 1)  # type: ignore[return-value]


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One thread at a time renders with it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], optimized=False
        )
        self.meter = _Meter()
        self.filters = {name: self._bound(one, name) for name, one in self.filters.items() if name not in _LEFT_OUT}
        del self.globals["lipsum"]
        self.concat = self.bounded_join  # type: ignore[method-assign]

    def start(self, given: Any) -> None:
        """Before a rendering of these variables."""
        self.meter = _Meter(_Meter().measure(given))

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bound(function, name)

    def bounded_rounds(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.meter.tick()
            yield value

    def bounded_value(self, value: Any) -> Any:
        return self.meter.count(value)

    def bounded_text(self, *values: Any) -> str:
        return self.bounded_join(map(str, values))

    def bounded_join(self, pieces: Iterable[str]) -> str:
        """What a block, a macro or the whole template has written."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            self.meter.allow(size)
            found.append(piece)
        return str(self.meter.count("".join(found)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.tick()
        if operator == "*":
            self._allow_product(left, right)
        elif operator == "**":
            self._allow_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._allow_format(left, right)
        return self.meter.count(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.tick()
        __self._allow_call(__obj, args, kwargs)
        return __self.meter.count(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if callable(value) and isinstance(obj, str | bytes | list | tuple | dict | set | int | float | range):
            allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), frozenset[str]())
            return attr in allowed and bool(super().is_safe_attribute(obj, attr, value))
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ != "format":
            raise SecurityError("format_map is not supported")

        def format_text(*args: Any, **kwargs: Any) -> str:
            self._allow_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return format_text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _BoundsTransformer().visit(tree)

    def _bound(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A filter that is measured; what Jinja has noted on it stays."""

        start = int(hasattr(function, "jinja_pass_arg"))  # where the value stands: behind what Jinja itself passes

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            args = tuple(self._taken(one) if isinstance(one, Iterator) else one for one in args)
            self._allow_arguments(name, args[start:], kwargs)
            found = function(*args, **kwargs)
            return found if isinstance(found, Iterator) else self.meter.count(found)

        return bounded

    def _taken(self, values: Iterator[Any]) -> list[Any]:
        """All of a lazy sequence, which may hold one long text again and again."""
        found, size = [], 0
        for value in values:
            self.meter.tick()
            size += self.meter.measure(value)
            self.meter.allow(size)
            found.append(value)
        return found

    def _allow_call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self._allow_arguments(function.__name__, (owner, *args), kwargs)

    def _allow_arguments(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Of filters and of methods of texts, whose first argument is what they work on."""
        rest, allow, measure = [*args[1:], *kwargs.values()], self.meter.allow, self.meter.measure
        numbers = [one for one in rest if isinstance(one, int)]
        if max(numbers, default=0) > (_MAX_INDENT if name == "tojson" else _MAX_NUMBER):
            raise TemplateBoundError(f"{name} is given a number that is too large")
        if name == "replace" and len(rest) > 1:
            text, new = str(args[0]), str(rest[1])
            allow(len(text) + text.count(str(rest[0])) * len(new))
        elif name == "join" and rest:
            one, other = measure(args[0]), measure(rest[0])  # of texts and what stands between them, in either order
            allow(one * other)
        elif name == "indent" and args:
            width = max([4, *numbers, *(len(one) for one in rest if isinstance(one, str))])
            allow(len(str(args[0])) + str(args[0]).count("\n") * width)

    def _allow_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                self.meter.allow(self.meter.measure(value) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateBoundError("it computes with huge numbers")

    def _allow_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
            raise TemplateBoundError("it computes with huge numbers")

    def _allow_format(self, form: str, values: Any) -> None:
        if _WIDE_FORMAT.search(form):
            raise TemplateBoundError("it formats to a width that is too large, or that comes as an argument")
        self.meter.allow(len(form) + (form.count("{") + form.count("%")) * self.meter.measure(values))


class _GenerationTag(Extension):
    """Some templates mark the assistant's words with {% generation %}; for rendering the tag means nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
