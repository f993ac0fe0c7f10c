"""The pilot: what decides how far to draft and what to check.

A pilot is a policy without state. What a request remembers is in a memory that the engine keeps for it.

    start    once, right after prefill: a request's memory
    choose   before drafting: each request's draft size (0: decode plainly), and where it can be said already, how many
             nodes to check, so that a device can go on from the draft to the check without asking
    select   after drafting, where it could not: the tree of nodes that the target shall check
    learn    after checking: what came of it

All take the requests of a step at once and see small plain values only, so the same object runs in our engine, in
replay and inside other engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.draft import Copy, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.calibration import Calibrations

if TYPE_CHECKING:
    from torch import Tensor  # a pilot's name can be checked without PyTorch


@dataclass(frozen=True, kw_only=True)
class PrefillState:
    """What the target knows of a request when its prompt has been read."""

    num_prompt_tokens: int
    probabilities: "Tensor"  # [V] float32, of the first answer token, at temperature 1
    hidden: "Tensor"  # [H], the last prompt token's final hidden state
    logits: "Tensor | None" = None  # [V] float32; None: a trace keeps the likeliest tokens alone, the others count as 0


class PilotInputs(NamedTuple):
    """What a pilot may know before it decides on one request's next step."""

    num_steps: int  # steps this request has taken so far
    context_length: int  # tokens in the target's cache
    batch_size: int  # requests that share the step
    num_remaining: int  # tokens the answer may still gain; deeper nodes are dropped
    max_block_size: int  # the drafter's limit
    trained_block_size: int
    temperature: float
    buckets: tuple[int, ...] = ()  # sizes that all checks of a batch are padded to together; none: as they are
    copy: Copy | None = None  # out of the request's own text, for pilots that read copies


class Choice(NamedTuple):
    """What a request shall draft and, where it can be said before the draft, which nodes of it are checked."""

    draft_size: int  # block size: the anchor and the positions behind it; 0 or 1: plain decoding
    num_nodes: int | None = None  # the likeliest ones are checked; None: `select` must see the draft
    is_chain: bool = False  # only the best child of each
    calibrations: Calibrations | None = None  # of the drafter's scores; None: they are taken at their word
    is_copied: bool = False  # nothing is drafted, and `select` picks its nodes out of the request's own text

    @property
    def is_whole_chain(self) -> bool:
        """Whether the draft's best chain is checked whatever its scores are."""
        return self.is_chain and self.calibrations is None and self.num_nodes is not None


PLAIN = Choice(0)


def whole_chain(block_size: int) -> Choice:
    return Choice(block_size, MAX_TREE_NODES, is_chain=True)


class Selection(NamedTuple):
    """The nodes of a request that are to be checked."""

    tree: DraftTree
    promised: float = 0.0  # tokens that they bring if their probabilities are right; the target's own comes on top
    head: Sequence[float] = ()  # how likely the draft's best chain is right up to each of its first positions


class Asked(NamedTuple):
    """A request before its draft."""

    memory: Any
    inputs: PilotInputs


class Drafted(NamedTuple):
    """A request after its draft."""

    memory: Any
    inputs: PilotInputs
    choice: Choice
    draft: HostDraft  # empty where nothing was drafted
    anchor_id: int


class Outcome(NamedTuple):
    """What came of a drafted step."""

    memory: Any
    inputs: PilotInputs
    depth: int  # of the deepest node that was checked; 0: none was
    promised: float
    head: Sequence[float]
    emitted: int


class Pilot(ABC):
    reads_prefill = False  # whether `start` wants the prefill's state; others get None
    reads_copies = False  # whether `PilotInputs.copy` is looked for

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """Tokens per position it wants to see. 0: it never drafts; 1: it wants a chain."""

    def start(self, prefill: PrefillState | None, neighbours: Sequence[Any] = ()) -> Any:
        """The memory of a request; `neighbours` are those of the requests that this pilot decides for already."""
        return None

    def rests(self, neighbours: Sequence[Any]) -> bool:
        """Whether a request that joins these memories will not draft at once: its drafter may read the prompt later."""
        return False

    @abstractmethod
    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        """For requests that share a step."""

    @abstractmethod
    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        """Of those that have drafted. No node lies deeper than the request's answer may still reach."""

    def learn(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027  # most remember nothing
        """Of drafted steps, when they are over and the answers go on."""

    def options(self, trained_block_size: int) -> Sequence[Choice]:
        """Choices that an engine may record in advance; 0 nodes mean any number. Empty: unknown."""
        return ()
