"""What a step costs, and what a walk of steps adds up to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class StepCosts(Protocol):
    """Milliseconds of a machine. `tokens` is what the target checks per request: anchor and nodes.

    An `overhead_ms`, where there is one, is added to every step of a request that drafts.
    """

    def draft_ms(self, block_size: int, batch_size: int = 1) -> float: ...

    def verify_ms(self, tokens: int, batch_size: int = 1, context_length: int = 256) -> float: ...


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    anchor: int  # answer index of the step's anchor
    block_size: int  # draft size; 1: plain decoding
    verify_size: int
    emitted: int
    milliseconds: float = 0.0  # of drafting and checking; 0 where no costs were given


@dataclass(frozen=True)
class Totals:
    num_steps: int
    emitted: int
    milliseconds: float

    @property
    def tau(self) -> float:
        return self.emitted / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.emitted / self.milliseconds if self.milliseconds else 0.0


def total(walks: Iterable[Sequence[SimulatedStep]]) -> Totals:
    """All steps of many requests together."""
    steps = [step for walk in walks for step in walk]
    return Totals(len(steps), sum(step.emitted for step in steps), sum(step.milliseconds for step in steps))
