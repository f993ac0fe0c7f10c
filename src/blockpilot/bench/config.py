"""What a benchmark run measures. Plain values, checked before anything heavy is imported."""

from dataclasses import dataclass

from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams

KNOWN_METHODS = (
    "ar, ngram, ngram:B, eagle3, eagle3:B, eagle3-tree, eagle3-tree:N, dflash:B, best-fixed, tree:N, tree:N@B, "
    "blockpilot, chain-step, step, auto"
)
SPLITS = ("test", "calibration", "all")
BEST_FIXED_SIZES = tuple(range(2, 17))
QUICK_TASKS = ("gsm8k", "math500", "humaneval", "mt_bench")
QUICK_METHODS = ("ar", "ngram", "eagle3", "dflash:4", "dflash:16", "auto")
QUICK_PROMPTS, QUICK_TOKENS = 1, 48


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
    calibration_prompts: int = 2  # per task, for best-fixed

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("no tasks to measure")
        if not self.methods or self.methods[0] != "ar" or len(set(self.methods)) != len(self.methods):
            raise InputError("methods are named once each, and plain decoding (ar) is the first")
        if self.num_prompts < 0:
            raise InputError(f"the number of prompts must be at least 0 (all), got {self.num_prompts}")
        for name in ("repeats", "concurrency", "calibration_prompts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}")
        if self.split not in SPLITS:
            raise InputError(f"unknown split {self.split!r}; known: {', '.join(SPLITS)}")
        if "best-fixed" in self.methods and self.split != "test":
            raise InputError("best-fixed is chosen on calibration prompts, so it is measured on --split test alone")
        self.params(self.seed)

    def params(self, seed: int) -> SamplingParams:
        """How a prompt with this seed is answered."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=seed)
