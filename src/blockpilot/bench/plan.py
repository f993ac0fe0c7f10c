"""Which prompts run together, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from blockpilot.bench.asking import Round, encode_turn
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import InputError
from blockpilot.text.prompts import Prompt
from blockpilot.text.tokenizer import Tokenizer

_MIN_CONTEXT = 1024  # step costs are remembered for a context of 256, which needs room
_MIN_BUDGET = 512


@dataclass(frozen=True)
class Fit:
    """The prompts that fit the model's context, and the room that the longest of them needs."""

    tasks: tuple[TaskPrompts, ...]
    num_left_out: dict[str, int]  # by task: prompts passed over because they are too long
    context_length: int
    longest: int  # tokens of a conversation with its answers

    def token_budget(self, concurrency: int) -> int:
        """Enough to prefill a batch in one pass: then all its requests start decoding in the same step."""
        return max(_MIN_BUDGET, concurrency * self.longest)


def fit_prompts(tasks: Sequence[TaskPrompts], tokenizer: Tokenizer, config: BenchConfig, limit: int) -> Fit:
    """The first prompts of every task that leave room for their answers in a context of `limit` tokens."""
    chosen, left_out, longest = [], {}, 0
    for task in tasks:
        taken = _Taken(tokenizer, config.max_new_tokens, limit)
        prompts = taken.take(task.prompts, config.num_prompts or len(task.prompts))
        if not prompts:
            raise InputError(f"task {task.name}: no prompt fits a context of {limit} tokens with its answer")
        if taken.num_long:
            left_out[task.name] = taken.num_long
        calibration = taken.take(task.calibration, config.num_calibration)
        longest = max(longest, taken.longest)
        chosen.append(replace(task, prompts=prompts, calibration=calibration))
    return Fit(tuple(chosen), left_out, min(limit, max(_MIN_CONTEXT, longest)), longest)


class _Taken:
    """Takes prompts that fit and counts those that do not."""

    def __init__(self, tokenizer: Tokenizer, max_new_tokens: int, limit: int) -> None:
        self.tokenizer, self.max_new_tokens, self.limit = tokenizer, max_new_tokens, limit
        self.num_long = self.longest = 0

    def take(self, prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
        found: list[Prompt] = []
        for prompt in prompts:
            if len(found) == count:
                break
            num_tokens = self._count(prompt)
            if num_tokens > self.limit:
                self.num_long += 1
                continue
            found.append(prompt)
            self.longest = max(self.longest, num_tokens)
        return tuple(found)

    def _count(self, prompt: Prompt) -> int:
        """Tokens of the whole conversation, every answer as long as it may be."""
        empty = [""] * len(prompt.later_turns)
        return len(encode_turn(self.tokenizer, prompt, empty)) + len(prompt.turns) * self.max_new_tokens


def plan_rounds(tasks: Sequence[TaskPrompts], config: BenchConfig) -> list[Round]:
    """All rounds; tasks take turns, so that a run that is cut short has seen all of them."""
    return _take_turns([_cut(task.name, task.prompts, config.concurrency, config.repeats) for task in tasks])


def plan_calibration(tasks: Sequence[TaskPrompts], config: BenchConfig) -> list[Round]:
    """The same on calibration prompts, once."""
    return _take_turns([_cut(task.name, task.calibration, config.concurrency, 1) for task in tasks])


def _cut(task: str, prompts: Sequence[Prompt], size: int, repeats: int) -> list[Round]:
    starts = range(0, len(prompts), size)
    return [
        Round(task, batch, repeat, tuple(prompts[start : start + size]), start)
        for repeat in range(repeats)
        for batch, start in enumerate(starts)
    ]


def _take_turns(by_task: Sequence[Sequence[Round]]) -> list[Round]:
    return [work for row in zip_longest(*by_task) for work in row if work is not None]
