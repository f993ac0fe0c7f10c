"""How much there is to do and how long it may take: a guess before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.bench.config import BEST_FIXED_SIZES, BenchConfig
from blockpilot.bench.methods import BEST_FIXED
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.text.prompts import Prompt

RATES = {"cpu": 40.0, "cuda": 2000.0}  # tokens/s of the default pair, of a data-centre GPU, in order of magnitude
PREFILL_FACTOR = 10  # prompts are read so many times faster than answers are written
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    num_answers: int
    num_tokens: int  # at most
    seconds: float
    tokens_per_second: float  # that was assumed


def estimate(tasks: Sequence[TaskPrompts], config: BenchConfig, device: str) -> Estimate:
    """Every answer as long as it may be, every method as fast as plain decoding."""
    rate = RATES["cuda" if device.startswith("cuda") else "cpu"]
    num_answers, num_characters = 0, 0
    for task in tasks:
        parts = [(task.prompts[: config.num_prompts or None], len(config.methods) * config.repeats)]
        if BEST_FIXED in config.methods:
            count = max(config.calibration_prompts, config.concurrency)
            parts.append((task.calibration[:count], len(BEST_FIXED_SIZES)))
        for prompts, times in parts:
            num_answers += times * sum(len(prompt.turns) for prompt in prompts)
            num_characters += times * _count_characters(prompts)
    num_tokens = num_answers * config.max_new_tokens
    seconds = (num_tokens + num_characters / CHARACTERS_PER_TOKEN / PREFILL_FACTOR) / rate
    return Estimate(num_answers, num_tokens, seconds, rate)


def _count_characters(prompts: Sequence[Prompt]) -> int:
    return sum(len(turn) for prompt in prompts for turn in prompt.turns)


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
