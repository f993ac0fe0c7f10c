"""What a benchmark run measures, and about how long that takes. Checked before anything heavy is imported."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.config import device_type
from blockpilot.core.errors import InputError, require_at_least, require_at_most
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.text.prompts import SPLITS

KNOWN_METHODS = (
    "ar, ngram, ngram:B, eagle3, eagle3:B, eagle3-tree, eagle3-tree:N, dflash:B, best-fixed, tree:N, tree:N@B, "
    "best-fixed-tree, blockpilot, chain-step, step, auto"
)
BEST_FIXED = "best-fixed"
BEST_FIXED_TREE = "best-fixed-tree"
CANDIDATES = {  # of methods that are chosen on calibration prompts
    BEST_FIXED: tuple(f"dflash:{size}" for size in range(2, 19)),
    BEST_FIXED_TREE: ("tree:3@4", "tree:6@4", "tree:6@8", "tree:10@8", "tree:15@8", "tree:15", "tree:31", "tree:63"),
}
_RATES = {"cpu": 40.0, "cuda": 2000.0}  # tokens/s of the default pair, of a data-centre GPU, in order of magnitude
_PREFILL_FACTOR = 10  # prompts are read so many times faster than answers are written
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    tasks: tuple[str, ...]
    methods: tuple[str, ...]  # plain decoding first: everything is compared with it
    num_prompts: int = 8  # per task; 0: all
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    split: str = "test"
    concurrency: int = 1  # prompts answered at once
    token_budget: int | None = None  # prompt tokens of one pass; None: all prompts of a batch in one
    calibration_prompts: int = 2  # per task, for best-fixed and best-fixed-tree

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("no tasks to measure")
        if not self.methods or self.methods[0] != "ar" or len(set(self.methods)) != len(self.methods):
            raise InputError("methods are named once each, and plain decoding (ar) is the first")
        require_at_least(self, num_prompts=0, repeats=1, concurrency=1, token_budget=1, calibration_prompts=1)
        require_at_most(self, num_prompts=10**6, repeats=1000, concurrency=4096, token_budget=2**20, seed=2**48)
        require_at_most(self, calibration_prompts=10**6)
        if self.split not in SPLITS:
            raise InputError(f"unknown split {self.split!r}; known: {', '.join(SPLITS)}")
        if self.chosen and self.split != "test":
            raise InputError(f"{self.chosen[0]} is chosen on calibration prompts: it is measured on --split test alone")
        self.params(self.seed)

    @property
    def num_calibration(self) -> int:
        """Calibration prompts per task that methods are chosen on: at least one full batch, none without need."""
        return max(self.calibration_prompts, self.concurrency) if self.chosen else 0

    @property
    def chosen(self) -> tuple[str, ...]:
        """Methods that are chosen on calibration prompts."""
        return tuple(method for method in self.methods if method in CANDIDATES)

    @property
    def num_candidates(self) -> int:
        return sum(len(CANDIDATES[method]) for method in self.chosen)

    def params(self, seed: int) -> SamplingParams:
        """How a prompt with this seed is answered."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=seed)


QUICK = BenchConfig(
    tasks=("gsm8k", "math500", "humaneval", "mt_bench"),
    methods=("ar", "ngram", "eagle3", "dflash:4", "dflash:16", "auto"),
    num_prompts=1,
    max_new_tokens=48,
)


def estimate(tasks: Sequence[TaskPrompts], config: BenchConfig, device: str) -> dict[str, float]:
    """How much is to be decoded, and how long that takes at the rate that is named.

    Every answer is as long as it may be, every method as fast as plain decoding.
    """
    rate = _RATES[device_type(device)]
    num_answers, num_characters = 0, 0
    for task in tasks:
        measured = task.prompts[: config.num_prompts or None], len(config.methods) * config.repeats
        for prompts, times in (measured, (task.calibration[: config.num_calibration], config.num_candidates)):
            turns = [turn for prompt in prompts for turn in prompt.turns]
            num_answers += times * len(turns)
            num_characters += times * sum(map(len, turns))
    num_tokens = num_answers * config.max_new_tokens
    seconds = (num_tokens + num_characters / _CHARACTERS_PER_TOKEN / _PREFILL_FACTOR) / rate
    return {"num_answers": num_answers, "num_tokens": num_tokens, "seconds": seconds, "tokens_per_second": rate}
