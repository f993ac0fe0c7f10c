"""What replay tests share: requests, a collected folder, pilots with a memory, step costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockpilot import LLM, Completion
from blockpilot.pilots.base import Asked, Choice, Drafted, Outcome, Pilot, PilotInputs, PrefillState, Selection
from blockpilot.pilots.fixed import PlainPilot
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_tree
from blockpilot.replay.collect import collect
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.simulate import SimulatedStep
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


@dataclass(frozen=True)
class WatchingPilot(PlainPilot):
    """Keeps what it was told after every prefill."""

    reads_prefill: bool = True
    seen: list[PrefillState] = field(default_factory=list)

    def start(self, prefill: PrefillState | None, neighbours: Sequence[Any] = ()) -> None:
        assert prefill is not None
        self.seen.append(prefill)


@dataclass
class Mood:
    value: int = 0
    seen: list[PilotInputs] = field(default_factory=list)


@dataclass
class MoodyPilot(Pilot):
    """Its draft size and tree follow from the prefill, from every input and from what came of the steps before."""

    name: str = "moody"
    num_candidates: int = 4
    reads_prefill: bool = True
    started: list[Mood] = field(default_factory=list)  # of all requests, in their order

    def start(self, prefill: PrefillState | None, neighbours: Sequence[Any] = ()) -> Mood:
        assert prefill is not None
        surprise = int(100 * float(prefill.probabilities.max())) + int(100 * float(prefill.hidden[0]))
        self.started.append(Mood(prefill.num_prompt_tokens + surprise))
        return self.started[-1]

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [self._choose(memory, inputs) for memory, inputs in requests]

    def _choose(self, mood: Mood, inputs: PilotInputs) -> Choice:
        mood.seen.append(inputs)
        mood.value += inputs.num_steps + inputs.context_length + inputs.num_remaining
        return Choice((0, 8, 3, 8)[mood.value % 4])

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        found = []
        for mood, inputs, _, draft, anchor_id in requests:
            costs = falling_costs(1 + mood.value % 9)
            found.append(grow_tree(draft, anchor_id, GrowthRules(costs, inputs.num_remaining - 1)))
        return found

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            outcome.memory.value += outcome.emitted + outcome.depth + int(100 * outcome.promised)


@dataclass(frozen=True)
class LinearCosts:
    draft: float = 1.0
    token: float = 0.4
    base: float = 3.0
    overhead_ms: float = 0.0
    padding: tuple[int, ...] = ()

    def draft_ms(self, block_size: int, batch_size: int = 1) -> float:
        return self.draft

    def verify_ms(self, tokens: int, batch_size: int = 1, context_length: int = 256) -> float:
        return self.base + self.token * tokens * batch_size + 0.001 * context_length


def milliseconds(steps: Sequence[SimulatedStep]) -> float:
    return sum(step.milliseconds for step in steps)
