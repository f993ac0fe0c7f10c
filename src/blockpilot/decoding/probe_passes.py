"""What a probe runs: passes over trees and pieces of prompts, and what it says where one differs from plain passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.core.tree import DraftTree
from blockpilot.decoding.target import TargetRunner

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Difference:
    operation: str | None  # None: kernel by kernel the pass is right
    shape: str
    token: int  # its place among its request's tokens

    def __str__(self) -> str:
        if self.operation is None:
            return f"recorded pass ({self.shape}): token {self.token} differs; run kernel by kernel it does not"
        return f"{self.operation} ({self.shape}): token {self.token} differs from its plain pass"


@dataclass(frozen=True)
class Pass:
    """Trees (slot, tree) that are checked together behind `starts` rows, or pieces of prompts, as chains."""

    trees: Sequence[tuple[int, DraftTree]]
    starts: Sequence[int]
    is_prompt: bool = False

    def describe(self, request: int) -> str:
        """In the words of one of its requests."""
        tree, num_requests = self.trees[request][1], len(self.trees)
        kind = "prompt piece" if self.is_prompt else "chain" if tree.is_chain else "tree"
        counts = [f"{len(tree)} token{'s'[: len(tree) > 1]}", f"{num_requests} request{'s'[: num_requests > 1]}"]
        return f"{kind} of {', '.join(counts)}, start {self.starts[request]}"

    def run(self, runner: TargetRunner) -> Tensor:
        """Logits of all nodes, or of each piece's last token; valid until the next pass. Only pieces are committed."""
        if self.is_prompt:
            return runner.prefill([(slot, list(tree.token_ids)) for slot, tree in self.trees], ()).logits
        result = runner.verify(self.trees, ())
        runner.keep([(slot, ()) for slot, _ in self.trees])
        firsts = zip(result.row_starts, self.trees, strict=True)
        return torch.cat([result.logits[first : first + len(tree)] for first, (_, tree) in firsts])

    def rewind(self, runner: TargetRunner) -> None:
        for (slot, _), start in zip(self.trees, self.starts, strict=True):
            runner.cache.rewind(slot, start)


def bits(values: Tensor) -> Tensor:
    """As integers: zeros of either sign differ, and a NaN equals itself."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def read_token(runner: TargetRunner, slot: int, token_id: int) -> Tensor:
    """Logits [V] of a token in a plain pass of its own, valid until the next; the token is committed."""
    logits = runner.verify([(slot, DraftTree.chain(token_id, []))], ()).logits[0]
    runner.keep([(slot, (0,))])
    return logits


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the anchor to this one."""
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    return path[::-1]


FindDifference = Callable[[TargetRunner, Pass, int, int], Difference]  # of a pass that has run, a request and its node
