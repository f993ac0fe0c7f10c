"""The pilot: what decides how far to draft and what to check.

`start` runs once, right after prefill, and returns the pilot of this one request: itself where nothing is remembered
between steps. `choose` runs before drafting and returns the draft size (0: do not draft, decode plainly). `select` runs
after drafting and returns the nodes the target shall check. All see small plain values only, so the same object runs in
our engine, in replay and inside other engines. An engine that has many requests asks for all at once (`batch.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockpilot.core.candidates import Candidates, FloatArray
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor  # a pilot's name can be checked without PyTorch

Nodes = list[tuple[int, int]]  # (parent index, token id), parents first; index 0 is the anchor


@dataclass(frozen=True, kw_only=True)
class PrefillState:
    """What the target knows of a request when its prompt has been read."""

    num_prompt_tokens: int
    probabilities: "Tensor"  # [V] float32, of the first answer token, at temperature 1
    hidden: "Tensor"  # [H], the last prompt token's final hidden state


class PilotInputs(NamedTuple):
    """What a pilot may know before it decides on one request's next step."""

    num_steps: int  # steps this request has taken so far
    context_length: int  # tokens in the target's cache
    batch_size: int  # requests that share the step
    num_remaining: int  # tokens the answer may still gain; deeper nodes are dropped
    max_block_size: int  # the drafter's limit
    trained_block_size: int
    temperature: float
    last_emitted: int  # tokens the last step emitted; 0 before the first


class Ahead(NamedTuple):
    """What to check, said before the draft: its likeliest nodes. An engine may then take them without asking again."""

    num_nodes: int
    is_chain: bool = False  # only the best child of each
    weights: tuple[FloatArray, FloatArray] | None = None  # calibrations of requests that are greedy, and that sample


class Habits(NamedTuple):
    """What steps may be like that are said ahead."""

    draft_sizes: Sequence[int]
    ahead: Ahead  # however many nodes


class Outcome(NamedTuple):
    """What became of nodes that were taken so."""

    pilot: "Pilot"
    inputs: PilotInputs
    depth: int  # of the deepest; 0: none was taken
    promised: float  # tokens that they bring if their probabilities are right
    head: Sequence[float]  # how likely the draft's best chain is right up to its first positions


Asked = tuple["Pilot", PilotInputs]  # a request before its draft
Drafted = tuple["Pilot", PilotInputs, Candidates, int]  # and after it, with its anchor's token id


class Pilot(ABC):
    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """Tokens per position it wants to see. 0: it never drafts; 1: it wants a chain."""

    @property
    def reads_prefill(self) -> bool:
        """Whether `start` wants the prefill's state; others get None."""
        return False

    @property
    def team(self) -> object:
        """Requests whose pilots have the same one are decided at once."""
        return self

    def start(self, prefill: PrefillState | None) -> "Pilot":
        """The pilot of one request."""
        return self

    @abstractmethod
    def choose(self, inputs: PilotInputs) -> int: ...

    @abstractmethod
    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes: ...

    @property
    def learns(self) -> bool:
        """Whether it wants to know what became of nodes that it has not selected itself."""
        return False

    def ahead(self, inputs: PilotInputs) -> Ahead | None:
        """After `choose`, what `select` will do, for all of this pilot's team; None: it must see the draft."""
        return None

    @property
    def habits(self) -> Habits | None:
        """Of a pilot that changes its mind between steps: an engine may get ready for all of them."""
        return None

    def learn(self, team: Sequence[Outcome]) -> None:
        """Instead of `select`, of all of this pilot's team for whom the engine has done what `ahead` said."""
        raise NotImplementedError(f"the pilot {self.name!r} does not learn")

    def select_tree(self, inputs: PilotInputs, candidates: Candidates, anchor_id: int) -> DraftTree:
        """The selected nodes behind their anchor, as many as one check takes; deeper ones could not be emitted."""
        tree = DraftTree.build(anchor_id, self.select(inputs, candidates)[:MAX_TREE_NODES])
        return tree.up_to(inputs.num_remaining - 1)

    def choose_sizes(self, team: Sequence[Asked]) -> list[int]:
        """`choose` of every request that is of this pilot's team and takes part in one step."""
        return [pilot.choose(inputs) for pilot, inputs in team]

    def select_trees(self, team: Sequence[Drafted]) -> list[DraftTree]:
        """`select_tree` of every one of them that has drafted."""
        return [pilot.select_tree(inputs, candidates, anchor_id) for pilot, inputs, candidates, anchor_id in team]
