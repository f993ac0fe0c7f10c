"""What a collection run shall record. Plain values, checked before anything heavy is imported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockpilot.core.config import MAX_BLOCK_SIZE, EngineConfig
from blockpilot.core.errors import InputError, require_at_least, require_at_most
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.text.prompts import Prompt

PlacedPrompt = tuple[str, int, Prompt]  # task, place in its file, prompt
_DEFAULT_SIZES = (*range(2, 21), 24, 32)
DEFAULT_DRAFT_SIZES = (4, 8, 16)
_ANCHORS = ("every", "visited")
_PRECISIONS = ("float16", "float32")
_MAX_CANDIDATES = 254  # ranks are bytes, and 255 stands for absent


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    sizes: tuple[int, ...] = _DEFAULT_SIZES  # chains drafted and checked at these block sizes: their emitted lengths
    draft_sizes: tuple[int, ...] = DEFAULT_DRAFT_SIZES  # of these, every candidate is kept as well
    num_candidates: int = 8
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    anchors: str = "every"  # or visited: only where a fixed chain of each size would stand
    precision: str = "float16"
    whole_logits: bool = False  # keep all logits of the first token, not just the likeliest tokens
    shard_size: int = 16  # requests per file

    def __post_init__(self) -> None:
        for size in self.sizes:
            if not 2 <= size <= MAX_BLOCK_SIZE:
                raise InputError(f"block size {size}: sizes lie between 2 and {MAX_BLOCK_SIZE}")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise InputError(f"sizes {self.sizes}: give at least one, each once, in ascending order")
        if missing := [size for size in self.draft_sizes if size not in self.sizes]:
            raise InputError(f"draft size {missing[0]} is not among the sizes {', '.join(map(str, self.sizes))}")
        if not 1 <= self.num_candidates <= _MAX_CANDIDATES:
            raise InputError(f"candidates must lie between 1 and {_MAX_CANDIDATES}, got {self.num_candidates}")
        if self.anchors not in _ANCHORS:
            raise InputError(f"unknown anchors {self.anchors!r}; known: {', '.join(_ANCHORS)}")
        if self.anchors == "visited" and self.draft_sizes:
            raise InputError("candidates are kept at every anchor or not at all: leave out draft sizes, or visit every")
        if self.precision not in _PRECISIONS:
            raise InputError(f"unknown precision {self.precision!r}; known: {', '.join(_PRECISIONS)}")
        require_at_least(self, shard_size=1)
        require_at_most(self, shard_size=2**20, seed=2**48)  # room for the places of prompts behind the seed
        self.params(self.seed)

    def params(self, seed: int) -> SamplingParams:
        """How a request with this seed is answered."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=seed)


@dataclass(frozen=True)
class ReplayRequest:
    prompt_id: str
    task: str  # the prompt set it comes from
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class CollectJob:
    """A whole run, with its models by name: whoever carries it out loads them."""

    target: str
    drafter: str
    engine: EngineConfig
    prompts: Sequence[PlacedPrompt]
    config: CollectConfig
    source: Mapping[str, Any]  # where prompts and weights come from
