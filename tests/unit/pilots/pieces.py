"""Inputs, drafts and batches that several pilot tests share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import Asked, Choice, Drafted, Outcome, Pilot, PilotInputs, Selection
from blockpilot.pilots.fitting import ABSENT, Drafts

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def make_inputs(**changes: Any) -> PilotInputs:
    values = {
        "num_steps": 3,
        "context_length": 20,
        "batch_size": 1,
        "num_remaining": 100,
        "max_block_size": 64,
        "trained_block_size": 16,
        "temperature": 0.0,
    }
    return PilotInputs(**(values | changes))


def choose_one(pilot: Pilot, inputs: PilotInputs, memory: Any = None) -> Choice:
    return pilot.choose([Asked(memory, inputs)])[0]


def select_one(
    pilot: Pilot, inputs: PilotInputs, draft: HostDraft, memory: Any = None, choice: Choice | None = None
) -> Selection:
    """Out of a draft that was asked for at its own size, behind the anchor 9."""
    choice = choice or Choice(draft.num_positions + 1)
    return pilot.select([Drafted(memory, inputs, choice, draft, 9)])[0]


def nodes_of(tree: DraftTree) -> list[tuple[int, int]]:
    """(parent, token id) of all nodes behind the anchor."""
    return list(zip(tree.parents[1:], tree.token_ids[1:], strict=True))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return (scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))).astype(np.float32)


def random_draft(seed: int, *, depth: int = 7, width: int = 4, is_pairwise: bool = True) -> HostDraft:
    random = np.random.default_rng(seed)
    ids = np.arange(depth * width, dtype=np.int64).reshape(depth, width) + 100
    marginals = -np.sort(-log_softmax(random.normal(size=(depth, width)) * 2))
    if not is_pairwise:
        return Draft(ids, marginals)
    pairwise = log_softmax(random.normal(size=(depth - 1, width, width)) * 2)
    return Draft(ids, marginals, log_softmax(random.normal(size=width) * 2), pairwise)


def sure_draft(probability: float, depth: int = 15, width: int = 8) -> HostDraft:
    """Every position's first token is right with the same probability; the rest is spread over the others."""
    row = np.full(width, (1 - probability) / width)
    row[0] = probability
    log_probs = np.log(np.tile(row, (depth, 1)).astype(np.float32))
    return Draft(np.tile(np.arange(width, dtype=np.int64), (depth, 1)), log_probs)


@dataclass
class Batch:
    """Requests of one pilot that decode together, as an engine drives them."""

    pilot: Pilot
    buckets: tuple[int, ...] = ()
    memories: list[Any] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)

    def join(self, count: int = 1) -> None:
        for _ in range(count):
            self.memories.append(self.pilot.start(None, self.memories.copy()))
            self.num_steps.append(0)

    def leave(self, index: int) -> None:
        del self.memories[index], self.num_steps[index]

    def inputs(self, index: int, **changes: Any) -> PilotInputs:
        values = {"num_steps": self.num_steps[index], "batch_size": len(self.memories), "buckets": self.buckets}
        return make_inputs(**(values | changes))

    def step(self, shares: Sequence[float], emitted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Draft sizes, and numbers of nodes of those that draft, whose drafts are as sure as told.

        A request emits as many tokens as told, but no more than its tree is deep and one.
        """
        asked = [Asked(memory, self.inputs(index)) for index, memory in enumerate(self.memories)]
        choices = self.pilot.choose(asked)
        drafting = [index for index, choice in enumerate(choices) if choice.draft_size > 1]
        drafted = [
            Drafted(*asked[index], choices[index], sure_draft(shares[index], choices[index].draft_size - 1), 9)
            for index in drafting
        ]
        found = self.pilot.select(drafted) if drafted else []
        outcomes = [
            Outcome(*asked[index], tree.max_depth, promised, head, min(emitted[index], 1 + tree.max_depth))
            for index, (tree, promised, head) in zip(drafting, found, strict=True)
        ]
        if outcomes:
            self.pilot.learn(outcomes)
        self.num_steps = [count + 1 for count in self.num_steps]
        return [choice.draft_size for choice in choices], [len(one.tree) - 1 for one in found]


def true_probabilities(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """What scores [N, D, K] stand for: `truth` [D, (offset, slope)] on their logits, siblings excluding each other."""
    shares = np.exp(scores.astype(np.float64))
    logits = truth[:, 0, None] + truth[:, 1, None] * np.log(shares / (1 - shares))
    right = 1 / (1 + np.exp(-logits))
    return right / np.maximum(right.sum(axis=-1, keepdims=True), 1)


def make_drafts(
    truth: np.ndarray, *, num_anchors: int = 3000, depth: int = 4, width: int = 4, seed: int = 0, length: int = 50
) -> Drafts:
    """Answers of `length` anchors, drawn from what the scores stand for."""
    random = np.random.default_rng(seed)
    scores = log_softmax(random.normal(size=(num_anchors, depth, width)) * 1.5)
    draws = random.random((num_anchors, depth, 1))
    ranks = (draws > true_probabilities(scores, truth).cumsum(axis=-1)).sum(axis=-1)
    true_ranks = np.where(ranks < width, ranks, ABSENT).astype(np.uint8)
    return Drafts(log_probs=scores, true_ranks=true_ranks, starts=range(0, num_anchors, length))
