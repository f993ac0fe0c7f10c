"""Was the result right? The last boxed expression of an answer, or its last number, against the known result."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\d)?$")  # 5\text{ cm}^2
_NOISE = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\$", "$", r"\%", "%", r"^\circ", r"^{\circ}", r"\ ")


def is_right(answer: str, expected: str) -> bool:
    found = find_result(answer)
    return found is not None and is_same(found, expected)


def find_result(answer: str) -> str | None:
    """What the answer gives as its result."""
    boxed = _last_boxed(answer)
    if boxed is not None:
        return boxed
    numbers = _NUMBER.findall(answer)
    return numbers[-1] if numbers else None


def is_same(first: str, second: str) -> bool:
    """Equal as numbers, or letter by letter once notation that means nothing is gone."""
    one, two = normalize(first), normalize(second)
    if one == two:
        return True
    numbers = _as_number(one), _as_number(two)
    return numbers[0] is not None and numbers[0] == numbers[1]


def normalize(text: str) -> str:
    text = text.strip().rstrip(".")
    text = _WRAPPED.sub(r"\1", _UNIT.sub("", text))
    for noise in _NOISE:
        text = text.replace(noise, "")
    text = _FRACTION.sub(lambda match: f"{_bare(match[1])}/{_bare(match[2])}", text)
    text = re.sub(r"\s+", "", text)
    name, equals, value = text.partition("=")
    return value if equals and len(name) == 1 and name.isalpha() else text  # x=5 is 5


def _bare(group: str) -> str:
    inner = group.strip("{}")
    return inner if re.fullmatch(r"\w+|-?[\d.]+|\\[a-z]+", inner) else f"({inner})"


def _as_number(text: str) -> Fraction | None:
    text = text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _last_boxed(text: str) -> str | None:
    """The content of the last whole \\boxed{...}, braces matched."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None
