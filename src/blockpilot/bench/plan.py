"""Which prompts run together, and in which order."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from blockpilot.bench.answers import RoundKey
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.methods import Method
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import InputError
from blockpilot.text.prompts import Prompt
from blockpilot.text.tokenizer import Tokenizer

_MIN_CONTEXT = 1024  # step costs are remembered for a context of 256, which needs room
_MIN_BUDGET = 512


@dataclass(frozen=True)
class Round:
    """A batch of prompts of one task that every method answers in turn."""

    task: str
    batch: int
    repeat: int
    prompts: tuple[Prompt, ...]
    first_place: int  # of its first prompt in the task; seeds count on from there

    @property
    def key(self) -> RoundKey:
        return self.task, self.batch, self.repeat

    @property
    def num_answers(self) -> int:
        """Of one method."""
        return sum(len(prompt.turns) for prompt in self.prompts)

    def shuffle(self, methods: Sequence[Method], seed: int) -> list[Method]:
        """An order of its own, so that drift of the machine hits all methods alike."""
        order = random.Random(f"{seed} {self.task} {self.batch} {self.repeat}")
        return order.sample(list(methods), len(methods))


def encode_turn(tokenizer: Tokenizer, prompt: Prompt, replies: Sequence[str]) -> list[int]:
    """The conversation up to the user turn after `replies`, which the model itself has given."""
    messages = []
    for said, reply in zip(prompt.turns, replies, strict=False):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
    messages.append({"role": "user", "content": prompt.turns[len(replies)]})
    return tokenizer.encode(tokenizer.apply_chat_template(messages))


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
    """The first prompts of every task that leave room for the longest answers in a context of `limit` tokens."""
    chosen, left_out, longest = [], {}, 0

    def take(prompts: Sequence[Prompt], count: int) -> tuple[tuple[Prompt, ...], int]:
        """Prompts that fit, and how many were passed over for them."""
        nonlocal longest
        found: list[Prompt] = []
        for place, prompt in enumerate(prompts):
            if len(found) == count:
                return tuple(found), place - count
            empty = [""] * len(prompt.later_turns)
            num_tokens = len(encode_turn(tokenizer, prompt, empty)) + len(prompt.turns) * config.max_new_tokens
            if num_tokens <= limit:
                found.append(prompt)
                longest = max(longest, num_tokens)
        return tuple(found), len(prompts) - len(found)

    for task in tasks:
        prompts, num_long = take(task.prompts, config.num_prompts or len(task.prompts))
        if not prompts:
            raise InputError(f"task {task.name}: no prompt fits a context of {limit} tokens with its answer")
        if num_long:
            left_out[task.name] = num_long
        chosen.append(replace(task, prompts=prompts, calibration=take(task.calibration, config.num_calibration)[0]))
    return Fit(tuple(chosen), left_out, min(limit, max(_MIN_CONTEXT, longest)), longest)


def plan_rounds(tasks: Mapping[str, tuple[Prompt, ...]], size: int, repeats: int = 1) -> list[Round]:
    """All rounds of `size` prompts; tasks take turns, so that a run that is cut short has seen all of them."""
    by_task = [
        [
            Round(name, batch, repeat, prompts[start : start + size], start)
            for repeat in range(repeats)
            for batch, start in enumerate(range(0, len(prompts), size))
        ]
        for name, prompts in tasks.items()
    ]
    return [work for row in zip_longest(*by_task) for work in row if work is not None]
