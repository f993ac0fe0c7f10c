"""Right or wrong, task by task. Lossless methods score alike: a score tells whether the answers are worth anything."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockpilot.bench.answers import Answer
from blockpilot.bench.audit import Place
from blockpilot.bench.final_answers import is_right
from blockpilot.bench.sandbox import passes
from blockpilot.text.prompts import Prompt

MATHEMATICS = ("gsm8k", "math500", "aime24")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Scorer:
    """Scores the first repeat of every prompt. Equal texts are judged once."""

    def __init__(self, places: Mapping[tuple[str, str], Place], *, is_code_scored: bool) -> None:
        self.places, self.is_code_scored = places, is_code_scored
        self._known: dict[tuple[str, str, str], bool] = {}

    def score(self, answers: Sequence[Answer]) -> dict[tuple[str, str], list[bool]]:
        """Task and method -> right or wrong for every prompt; tasks that cannot be scored are missing."""
        found: dict[tuple[str, str], list[bool]] = {}
        for answer in answers:
            judge = self._judge(answer.task)
            prompt = self.places[answer.task, answer.prompt_id].prompt
            if judge is None or answer.repeat or answer.turn or not _can_be_scored(answer.task, prompt):
                continue
            key = (answer.task, answer.prompt_id, answer.text)
            if key not in self._known:
                self._known[key] = judge(answer.text, prompt)
            found.setdefault((answer.task, answer.method), []).append(self._known[key])
        return found

    def _judge(self, task: str) -> Callable[[str, Prompt], bool] | None:
        if task in MATHEMATICS:
            return lambda text, prompt: is_right(text, str(prompt.answer))
        if not self.is_code_scored:
            return None
        programs = {"humaneval": humaneval_program, "mbpp": mbpp_program}
        if (build := programs.get(task)) is None:
            return None
        return lambda text, prompt: passes(build(text, prompt.meta))


def _can_be_scored(task: str, prompt: Prompt) -> bool:
    """A file of the user's own may bear a known name without what scoring needs."""
    if task in MATHEMATICS:
        return prompt.answer is not None
    needed = {"humaneval": ("prompt", "entry_point", "test"), "mbpp": ("test_list",)}[task]
    return all(name in prompt.meta for name in needed)


def extract_code(text: str) -> str:
    """The first fenced block, or everything."""
    match = _FENCE.search(text)
    return match[1] if match else text


def humaneval_program(text: str, meta: Mapping[str, Any]) -> str:
    """The answer may repeat the function or only continue it."""
    code, name = extract_code(text), meta["entry_point"]
    if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE):
        head = meta["prompt"].partition(f"def {name}")[0]  # imports and helpers that the prompt gives
        code = f"{head}\n{code}"
    else:
        code = meta["prompt"] + code
    return f"{code}\n{meta['test']}\ncheck({name})\n"


def mbpp_program(text: str, meta: Mapping[str, Any]) -> str:
    return "\n".join([*meta.get("test_imports", ()), extract_code(text), *meta["test_list"]]) + "\n"
