"""What the engine reports: one record per decoding step, one completion per request."""

from dataclasses import dataclass, field
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One draft-verify step of one request. Seconds are those of the whole batched step it was part of."""

    block_size: int  # draft size given to the drafter; 1: plain decoding
    verify_size: int  # tokens the target processed: anchor + nodes
    emitted: int
    draft_seconds: float
    verify_seconds: float
    pilot_seconds: float


@dataclass(kw_only=True)
class Completion:
    """A finished (or aborted) answer with everything that was measured on the way."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    finish_reason: str  # "stop", "length" or "abort"
    prefill_seconds: float
    decode_seconds: float
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def tau(self) -> float | None:
        """Emitted tokens per step; None when the first token ended the answer."""
        return sum(step.emitted for step in self.steps) / len(self.steps) if self.steps else None

    @property
    def pilot_seconds(self) -> float:
        return sum(step.pilot_seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        if not self.steps or self.decode_seconds <= 0:
            return None
        return sum(step.emitted for step in self.steps) / self.decode_seconds
