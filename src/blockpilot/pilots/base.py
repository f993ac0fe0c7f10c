"""The pilot: what decides how far to draft and what to check.

`choose` runs before drafting and returns the draft size (0: do not draft, decode plainly). `select` runs after drafting
and returns the nodes the target shall check. Both see small plain values only, so the same object runs in our engine,
in replay and inside other engines.
"""

from dataclasses import dataclass
from typing import Protocol

from blockpilot.core.candidates import Candidates

Nodes = list[tuple[int, int]]  # (parent index, token id), parents first; index 0 is the anchor


@dataclass(frozen=True, kw_only=True)
class PilotInputs:
    """What a pilot may know before it decides on one request's next step."""

    num_steps: int  # steps this request has taken so far
    context_length: int  # tokens in the target's cache
    batch_size: int  # requests that share the step
    max_block_size: int  # limit of this step: drafter, remaining tokens, context
    trained_block_size: int
    temperature: float
    last_emitted: int  # tokens the last step emitted; 0 before the first


class Pilot(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_candidates(self) -> int: ...  # tokens per position it wants to see; 0: it never drafts

    def choose(self, inputs: PilotInputs) -> int: ...

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes: ...
