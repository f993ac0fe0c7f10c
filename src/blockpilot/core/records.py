"""What the engine reports: one record per decoding step, one completion per request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class StepTree(NamedTuple):
    """What a step asked the target to check, node by node; the anchor comes first."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # -1: the anchor has none
    probabilities: tuple[float | None, ...]  # of nodes after their parents, as the drafter saw them; None: not drafted
    path: tuple[int, ...]  # the anchor and the nodes that were accepted
    next_id: int  # the target's own token behind the path


class StepRecord(NamedTuple):
    """One draft-verify step of one request. Seconds are those of the whole batched step it was part of."""

    block_size: int  # draft size given to the drafter; 1: plain decoding
    verify_size: int  # tokens the target processed: anchor + nodes
    emitted: int
    draft_seconds: float
    verify_seconds: float
    pilot_seconds: float
    tree: StepTree | None = None  # where the request keeps them
    promised: float = 0.0  # tokens that the nodes should have brought if the pilot was right; 0: it did not say


class TokenScore(NamedTuple):
    """How likely the target found a token that was emitted."""

    token_id: int
    log_prob: float
    best: tuple[tuple[int, float], ...] = ()  # the likeliest tokens of its place and their log-probabilities


@dataclass(kw_only=True)
class Completion:
    """A finished (or aborted) answer with everything that was measured on the way."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    finish_reason: str  # "stop", "length", "abort" or "error"
    prefill_seconds: float
    decode_seconds: float
    steps: list[StepRecord] = field(default_factory=list)
    num_reused_tokens: int = 0  # of the prompt, whose keys and values an earlier text had left
    scores: list[TokenScore] = field(default_factory=list)  # of all tokens, where they were asked for
    error: str | None = None  # what went wrong, in one line, where that is the reason

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


class Update(NamedTuple):
    """What a step has brought one request."""

    request_id: int
    new_text: str
    completion: Completion | None  # set when the request has finished
    steps: Sequence[StepRecord] = ()  # that have landed since the last update
    scores: Sequence[TokenScore] = ()  # of the tokens that have come since then, where they are asked for


def join_updates(updates: Sequence[Update]) -> Update:
    """Of one request, in their order."""
    if len(updates) == 1:
        return updates[0]
    return Update(
        updates[-1].request_id,
        "".join(update.new_text for update in updates),
        updates[-1].completion,
        [step for update in updates for step in update.steps],
        [score for update in updates for score in update.scores],
    )
