"""What replay tests share: requests, a collected folder, pilots with a memory, step costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockpilot.core.candidates import Candidates

from blockpilot import LLM, Completion
from blockpilot.pilots.base import Nodes, Pilot, PilotInputs, PrefillState
from blockpilot.pilots.growth import grow_tree
from blockpilot.replay.collect import collect
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.costs import SimulatedStep
from blockpilot.replay.trace_files import TraceSet
from tests.tiny import make_dflash, make_llm

PROMPTS = ["the quick brown fox", "abcabc", "Z", "speculation 0123", "one token"]
SIZES = (2, 3, 5, 8, 13)
SETTINGS: dict[str, Any] = {
    "sizes": SIZES,
    "draft_sizes": (3, 8),
    "num_candidates": 5,
    "max_new_tokens": 28,
    "precision": "float32",
    "shard_size": 2,
}


def ignore(*values: object) -> None:
    """A report that nobody reads."""


def make_pair(*, is_second: bool = True, **settings: Any) -> LLM:
    return make_llm(drafter=make_dflash(is_second=is_second), **settings)


def make_requests(llm: LLM, count: int = len(PROMPTS), seed: int = 3) -> list[ReplayRequest]:
    encoded = [llm.tokenizer.encode(text) for text in PROMPTS[:count]]
    return [ReplayRequest(f"p{place}", "tiny", ids, seed + place) for place, ids in enumerate(encoded)]


def make_config(**settings: Any) -> CollectConfig:
    return CollectConfig(**(SETTINGS | settings))


def run_collect(llm: LLM, out: Path, *, count: int = len(PROMPTS), **settings: Any) -> TraceSet:
    return collect(llm, make_requests(llm, count), make_config(**settings), out=out, report=ignore)


def decode(llm: LLM, pilot: Pilot, **settings: Any) -> list[Completion]:
    """The same requests online, all together."""
    requests, config = make_requests(llm), make_config(**settings)
    params = [config.params(request.seed) for request in requests]
    return llm.generate([request.prompt_ids for request in requests], params, pilot=pilot)


def shapes(steps: Sequence[Any]) -> list[tuple[int, int, int]]:
    return [(step.block_size, step.verify_size, step.emitted) for step in steps]


@dataclass
class MoodyPilot(Pilot):
    """Remembers: its draft size and tree follow from the prefill, from every input and from what it did before."""

    name: str = "moody"
    num_candidates: int = 4
    reads_prefill: bool = True
    mood: int = 0
    seen: list[PilotInputs] = field(default_factory=list)

    def start(self, prefill: PrefillState | None) -> Pilot:
        assert prefill is not None
        surprise = int(100 * float(prefill.probabilities.max())) + int(100 * float(prefill.hidden[0]))
        return MoodyPilot(mood=prefill.num_prompt_tokens + surprise)

    def choose(self, inputs: PilotInputs) -> int:
        self.seen.append(inputs)
        self.mood += inputs.last_emitted + inputs.num_steps + inputs.context_length + inputs.num_remaining
        return (0, 8, 3, 8)[self.mood % 4]

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return grow_tree(candidates, 1 + self.mood % 9)


@dataclass(frozen=True)
class LinearCosts:
    draft: float = 1.0
    token: float = 0.4
    base: float = 3.0

    def draft_ms(self, block_size: int, batch_size: int = 1) -> float:
        return self.draft

    def verify_ms(self, tokens: int, batch_size: int = 1, context_length: int = 256) -> float:
        return self.base + self.token * tokens * batch_size + 0.001 * context_length


def milliseconds(steps: Sequence[SimulatedStep]) -> float:
    return sum(step.milliseconds for step in steps)
