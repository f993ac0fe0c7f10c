"""What executes a decoding step: the contract between the engine and the two executors.

`host_step.py` runs a step stage by stage, and the host decides between stages. `gpu/step.py` enqueues a whole step, and
the next one behind it, before the host has read what it brings. Both give the same tokens.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from blockpilot.core.records import StepTree, TokenScore
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.adjusting import Adjustment
from blockpilot.decoding.drafter import DraftRequest
from blockpilot.pilots.base import Choice, Pilot, PilotInputs

NO_FAILURES: Mapping[int, str] = MappingProxyType({})
NO_SCORES: Mapping[int, Sequence[TokenScore]] = MappingProxyType({})
NO_TREES: Mapping[int, StepTree] = MappingProxyType({})


class StepRequest(NamedTuple):
    """One request of a step."""

    slot: int
    anchor_id: int
    params: SamplingParams
    pilot: Pilot
    memory: Any  # the pilot's
    inputs: PilotInputs
    choice: Choice
    adjustment: Adjustment | None = None  # where tokens are chosen by scores that the host makes

    @property
    def position(self) -> int:
        """Of the anchor in the sequence."""
        return self.inputs.context_length

    @property
    def block_size(self) -> int:
        """What is drafted, within the drafter's limit; 1 is plain decoding, as always for the last token."""
        inputs = self.inputs
        return max(1, min(self.choice.draft_size, inputs.max_block_size)) if inputs.num_remaining > 1 else 1

    def draft_request(self, block_size: int, limits: tuple[int, int] = (0, 0)) -> DraftRequest:
        return DraftRequest(
            self.slot, self.anchor_id, self.position, block_size, self.pilot.num_candidates, self.params, limits
        )


class Report(NamedTuple):
    """What was checked for one request."""

    verify_size: int  # the anchor and the nodes
    depth: int = 0  # of the deepest node
    promised: float = 0.0  # tokens that the nodes were to bring
    head: Sequence[float] = ()  # how likely the draft's best chain is right up to each of its first positions


class Landed(NamedTuple):
    """What a step has brought each request, and where the time went. The token `NO_TOKEN` is one that the target could
    not choose, because its scores are no numbers; nothing follows it."""

    emitted_ids: Sequence[Sequence[int]]
    reports: Sequence[Report]
    time: float  # when the host knew
    draft_seconds: float
    select_seconds: float
    verify_seconds: float
    scores: Mapping[int, Sequence[TokenScore]] = NO_SCORES  # of requests that asked for log-probabilities
    trees: Mapping[int, StepTree] = NO_TREES  # of requests that keep them
    failures: Mapping[int, str] = NO_FAILURES  # place of a request -> what went wrong with it alone


class StepExecutor(Protocol):
    """A ticket stands for a step in flight; what it is, only its executor knows."""

    def begin(self, requests: Sequence[StepRequest]) -> Any | None:
        """Start a step while no other is in flight. None: this executor cannot run it."""

    def follow(self, ticket: Any, positions: Sequence[int | None]) -> Any | None:
        """Enqueue the step behind one that has not landed: the same requests with the same choices, or None.

        `positions` are the anchors' positions before the step in flight; None: the request has finished.
        """

    def land(self, ticket: Any, is_wanted: Sequence[bool]) -> Landed:
        """Wait for the step. The caches keep what was accepted, of requests that are still wanted."""
