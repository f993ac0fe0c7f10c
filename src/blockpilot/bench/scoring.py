"""Right or wrong, task by task. Lossless methods score alike: a score tells whether the answers are worth anything.

Mathematics is judged by the last boxed expression of an answer, or its last number; programs by running them.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from blockpilot.bench.answers import Answer
from blockpilot.bench.audit import Place
from blockpilot.bench.sandbox import passes
from blockpilot.text.prompts import Prompt

_MATHEMATICS = ("gsm8k", "math500", "aime24")
_PROGRAMS = {"humaneval": ("prompt", "entry_point", "test"), "mbpp": ("test_list",)}  # what running them needs
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\d)?$")  # 5\text{ cm}^2
_NOISE = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\$", "$", r"\%", "%", r"^\circ", r"^{\circ}", r"\ ")


def score(
    answers: Sequence[Answer], places: Mapping[tuple[str, str], Place], *, is_code_scored: bool
) -> dict[tuple[str, str], list[bool]]:
    """Task and method -> right or wrong for the first repeat of every prompt; tasks that cannot be scored are missing.

    Equal texts are judged once.
    """
    known: dict[tuple[str, str, str], bool | None] = {}
    found: dict[tuple[str, str], list[bool]] = {}
    for answer in answers:
        if answer.repeat or answer.turn:
            continue
        key = (answer.task, answer.prompt_id, answer.text)
        if key not in known:
            prompt = places[answer.task, answer.prompt_id].prompt
            known[key] = _judge(answer.task, answer.text, prompt, is_code_scored=is_code_scored)
        if (verdict := known[key]) is not None:
            found.setdefault((answer.task, answer.method), []).append(verdict)
    return found


def _judge(task: str, text: str, prompt: Prompt, *, is_code_scored: bool) -> bool | None:
    """None: it cannot be scored. A file of the user's own may bear a known name without what scoring needs."""
    if task in _MATHEMATICS:
        return None if prompt.answer is None else is_right(text, prompt.answer)
    if not is_code_scored or task not in _PROGRAMS or not all(name in prompt.meta for name in _PROGRAMS[task]):
        return None
    return passes((humaneval_program if task == "humaneval" else mbpp_program)(text, prompt.meta))


def _extract_code(text: str) -> str:
    """The first fenced block, or everything."""
    return match[1] if (match := _FENCE.search(text)) else text


def humaneval_program(text: str, meta: Mapping[str, Any]) -> str:
    """The answer may repeat the function or only continue it."""
    code, name = _extract_code(text), meta["entry_point"]
    if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE):
        head = meta["prompt"].partition(f"def {name}")[0]  # imports and helpers that the prompt gives
        code = f"{head}\n{code}"
    else:
        code = meta["prompt"] + code
    return f"{code}\n{meta['test']}\ncheck({name})\n"


def mbpp_program(text: str, meta: Mapping[str, Any]) -> str:
    return "\n".join([*meta.get("test_imports", ()), _extract_code(text), *meta["test_list"]]) + "\n"


def is_right(answer: str, expected: str) -> bool:
    """Equal as numbers, or letter by letter once notation that means nothing is gone."""
    boxed = _last_boxed(answer)
    results = _NUMBER.findall(answer) if boxed is None else [boxed]
    if not results:
        return False
    found, wanted = _normalize(results[-1]), _normalize(expected)
    return found == wanted or (_as_number(found) is not None and _as_number(found) == _as_number(wanted))


def _normalize(text: str) -> str:
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
