"""Pilots that never change their mind: plain decoding, fixed chains and fixed trees. The baselines."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.core.candidates import Candidates, shared_stack
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Ahead, Drafted, Nodes, Pilot, PilotInputs
from blockpilot.pilots.growth import NO_WEIGHTS, exponentials, falling_costs, grow_chain, grow_stacked, grow_tree

TREE_WIDTH = 16  # candidates per position a tree may branch into


@dataclass(frozen=True)
class PlainPilot(Pilot):
    """Never drafts: autoregressive decoding."""

    name: str = "ar"
    num_candidates: int = 0

    def choose(self, inputs: PilotInputs) -> int:
        return 0

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return []


@dataclass(frozen=True)
class FixedPilot(Pilot):
    """Every step drafts and checks a chain of one fixed block size."""

    block_size: int
    num_candidates: int = 1

    def __post_init__(self) -> None:
        switch.load_compiled()

    @property
    def name(self) -> str:
        return f"fixed:{self.block_size}"

    def choose(self, inputs: PilotInputs) -> int:
        return self.block_size

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return grow_chain(candidates, self.block_size - 1)

    @property
    def team(self) -> object:
        return FixedPilot  # of all sizes

    def ahead(self, inputs: PilotInputs) -> Ahead:
        return Ahead(MAX_TREE_NODES, is_chain=True)  # as deep as the draft


@dataclass(frozen=True)
class TreePilot(Pilot):
    """Every step checks the `num_nodes` likeliest nodes, drafted at the trained size or at `draft_size`."""

    num_nodes: int
    draft_size: int | None = None
    num_candidates: int = TREE_WIDTH

    def __post_init__(self) -> None:
        switch.load_compiled()

    @property
    def name(self) -> str:
        return f"tree:{self.num_nodes}" + (f"@{self.draft_size}" if self.draft_size else "")

    def choose(self, inputs: PilotInputs) -> int:
        return self.draft_size or inputs.trained_block_size

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return grow_tree(candidates, self.num_nodes, inputs.num_remaining - 1)

    def ahead(self, inputs: PilotInputs) -> Ahead:
        return Ahead(self.num_nodes)

    def select_trees(self, team: Sequence[Drafted]) -> list[DraftTree]:
        drafts = [candidates for _, _, candidates, _ in team]
        stack = shared_stack(drafts)
        if stack is None or switch.load_compiled() is None:
            return super().select_trees(team)
        requests = [
            (draft.row, anchor_id, min(draft.num_positions, inputs.num_remaining - 1))
            for _, inputs, draft, anchor_id in team
        ]
        shares = exponentials(stack, 1 + max([draft.row for draft in drafts]))
        costs, width = falling_costs(self.num_nodes), drafts[0].width
        return grow_stacked(shares, requests, NO_WEIGHTS, costs, trust=1.0, width=width, is_chain=False).trees
