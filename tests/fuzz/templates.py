"""Random programs in the grammar of chat templates: what a model may come with."""

from random import Random

from tests.fuzz.mutations import change_bytes

_STATEMENTS = (
    "{{ VALUE }}",
    "{% for m in VALUE %}INNER{% endfor %}",
    "{% for a, b in VALUE recursive %}INNER{{ loop(b) }}{% endfor %}",
    "{% if VALUE %}INNER{% else %}{% endif %}",
    "{% set x = VALUE %}INNER",
    "{% set x %}INNER{% endset %}{{ x }}",
    "{% macro f(a=VALUE) %}INNER{% endmacro %}{{ f() }}",
    "{% filter FILTER %}INNER{% endfilter %}",
    "{% generation %}INNER{% endgeneration %}",
    "{% macro g() %}{{ caller(1) }}{% endmacro %}{% call(x) g() %}INNER{% endcall %}",
    "{% with x = VALUE %}INNER{% endwith %}",
    *(
        "{% break %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends VALUE %}",
        "{%",
        "{# ",
        "{{",
        "\x00",
        "$",
    ),
)
_VALUES = (
    *("messages", "m", "x", "f", "loop", "loop.index", "bos_token", "1", "-1", "2**40", "10**9", "1.5", "none", "'a'"),
    *("'a' * 10**7", "range(10**9)", "[1, 'a']", "{'a': 1}", "{'b': messages}", "self", "dict", "namespace()", "true"),
    *(
        "messages[0].content",
        "messages[0]['role']",
        "''.__class__",
        "x.y.z",
        "strftime_now",
        "raise_exception",
        "'%9d'",
    ),
)
_FILTERS = (
    *("upper", "tojson", "length", "trim", "join('x')", "batch(3)", "slice(0)", "indent(10**9)", "format(1)", "sort"),
    *("replace('a', 'b' * 99)", "map('upper')", "groupby('role')", "items", "list", "first", "round(-99)", "last"),
    *("int", "float", "abs", "sum", "min", "unique", "tojson(indent=10**6)", "attr('x')", "string", "reject", "nope"),
    *(
        "center(9**9)",
        "select('odd')",
        "dictsort",
        "xmlattr",
        "wordwrap(0)",
        "truncate(-1)",
        "random",
        "pprint",
        "int(0, 99)",
    ),
)
_EXPRESSIONS = (
    *("VALUE", "(OTHER) | FILTER", "(VALUE OPERATOR OTHER)", "(OTHER)[VALUE]", "(OTHER)[VALUE:VALUE]", "[OTHER] * 3"),
    *("(OTHER).METHOD(VALUE)", "CALLED(OTHER)", "(OTHER) is TEST", "(VALUE if OTHER else VALUE)", "{OTHER: VALUE}"),
)
_PARTS = {
    "OPERATOR": ("+", "-", "*", "/", "//", "**", "%", "~", "==", "<", "in", "and"),
    "METHOD": ("split", "format", "items", "join", "strip", "zfill", "encode", "__class__", "replace", "append", "get"),
    "CALLED": ("range", "f", "strftime_now", "raise_exception", "dict", "cycler", "joiner", "namespace", "loop.cycle"),
    "TEST": ("string", "mapping", "defined", "divisibleby(0)", "nope", "sameas(1)", "in(1)", "iterable"),
    "FILTER": _FILTERS,
    "VALUE": _VALUES,
}


def odd_template(random: Random, depth: int = 3) -> str:
    """A program of a few statements inside each other."""
    return "".join(_statement(random, depth) for _ in range(random.randrange(1, 4)))


def change_template(data: bytes, random: Random) -> bytes:
    """Another program, or other bytes."""
    return change_bytes(data, random) if random.random() < 0.5 else odd_template(random).encode()


def _statement(random: Random, depth: int) -> str:
    form = random.choice(_STATEMENTS)
    if "VALUE" in form:
        form = form.replace("VALUE", _expression(random, depth))
    inner = odd_template(random, depth - 1) if depth > 0 and "INNER" in form else "x"
    return form.replace("FILTER", random.choice(_FILTERS)).replace("INNER", inner)


def _expression(random: Random, depth: int) -> str:
    form = random.choice(_EXPRESSIONS if depth > 0 else ("VALUE",))
    for name, choices in _PARTS.items():
        while name in form:
            form = form.replace(name, random.choice(choices), 1)
    return form.replace("OTHER", _expression(random, depth - 1)) if "OTHER" in form else form
