"""Pilots that never change their mind: plain decoding, fixed chains and fixed trees. The baselines."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.pilots.base import PLAIN, Asked, Choice, Drafted, Pilot, Selection, whole_chain
from blockpilot.pilots.forecast import load_loops
from blockpilot.pilots.growth import MAX_WIDTH, GrowthRules, falling_costs, grow_chain, grow_tree


@dataclass(frozen=True)
class PlainPilot(Pilot):
    """Never drafts: autoregressive decoding."""

    name: str = "ar"
    num_candidates: int = 0

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [PLAIN] * len(requests)

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return [Selection(grow_chain(request.draft, request.anchor_id, 0)) for request in requests]


@dataclass(frozen=True)
class FixedPilot(Pilot):
    """Every step drafts and checks a chain of one fixed block size."""

    block_size: int
    num_candidates: int = 1

    def __post_init__(self) -> None:
        load_loops()

    @property
    def name(self) -> str:
        return f"fixed:{self.block_size}"

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [whole_chain(self.block_size)] * len(requests)

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return select_chains(requests)

    def options(self, trained_block_size: int) -> Sequence[Choice]:
        return [whole_chain(self.block_size)]


@dataclass(frozen=True)
class TreePilot(Pilot):
    """Every step checks the `num_nodes` likeliest nodes, drafted at the trained size or at `draft_size`."""

    num_nodes: int
    draft_size: int | None = None
    num_candidates: int = MAX_WIDTH

    def __post_init__(self) -> None:
        load_loops()

    @property
    def name(self) -> str:
        return f"tree:{self.num_nodes}" + (f"@{self.draft_size}" if self.draft_size else "")

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [choice for _, inputs in requests for choice in self.options(inputs.trained_block_size)]

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return [
            grow_tree(
                request.draft,
                request.anchor_id,
                GrowthRules(falling_costs(self.num_nodes), request.inputs.num_remaining - 1, width=request.draft.width),
            )
            for request in requests
        ]

    def options(self, trained_block_size: int) -> Sequence[Choice]:
        return [Choice(self.draft_size or trained_block_size, self.num_nodes)]


def select_chains(requests: Sequence[Drafted]) -> list[Selection]:
    """As deep as was drafted, and as the answer may still reach."""
    return [
        Selection(grow_chain(draft, anchor_id, min(choice.draft_size, inputs.num_remaining) - 1))
        for _, inputs, choice, draft, anchor_id in requests
    ]
