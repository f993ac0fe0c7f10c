"""What a probe compares with: random tokens, each read in a plain pass of its own behind those before it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from blockpilot.core.tree import DraftTree, tree_depths
from blockpilot.decoding.probe_passes import path_to, read_token
from blockpilot.decoding.target import TargetRunner

DEEPER = 0.6  # how often a node follows the one before it


@dataclass(eq=False)
class PlainText:
    slot: int
    token_ids: list[int]
    logits: dict[int, Tensor]  # [V] behind that many tokens, where they were asked for
    rows: Tensor  # [layers, 2, Hkv, tokens, D] keys and values
    draft: DraftTree  # what may be checked behind it
    draft_logits: Tensor  # [nodes, V]


class PlainReader:
    def __init__(self, runner: TargetRunner, random: Random) -> None:
        self.runner, self.random = runner, random
        self._num_not_finite = torch.zeros((), dtype=torch.int64, device=runner.device)

    @property
    def num_not_finite(self) -> int:
        """Kept rows of logits that hold an infinity or a NaN."""
        return int(self._num_not_finite)

    def read_text(
        self,
        slot: int,
        length: int,
        draft: DraftTree,
        ends: Collection[int],
        stops: Collection[int] = (),
        stop: Callable[[], None] = lambda: None,
    ) -> PlainText:
        """A new text and a draft behind it; logits are kept behind `ends` tokens.

        `stop` is called behind `stops` tokens. It may write behind them: the next tokens' rows replace what it left.
        """
        token_ids, logits = self.draw_ids(length), {}
        for place, token_id in enumerate(token_ids):
            if place in stops:
                stop()
            row = read_token(self.runner, slot, token_id)
            if place + 1 in ends:
                logits[place + 1] = self._keep(row)
        rows = self.runner.cache.copy_rows(slot, 0, length)
        return PlainText(slot, token_ids, logits, rows, draft, self.read_tree(slot, draft))

    def read_tree(self, slot: int, tree: DraftTree) -> Tensor:
        """Logits [nodes, V] at the end of each node's path; the slot forgets the nodes."""
        cache = self.runner.cache
        start = cache.lengths[slot]
        paths = [path_to(tree, node) for node in range(len(tree))]
        found: dict[int, Tensor] = {}
        for node in sorted(range(len(tree)), key=paths.__getitem__):  # branch by branch: ancestors' rows are there
            cache.rewind(slot, start + tree.depths[node])
            found[node] = self._keep(read_token(self.runner, slot, tree.token_ids[node]))
        cache.rewind(slot, start)
        return torch.stack([found[node] for node in range(len(tree))])

    def draw_ids(self, count: int) -> list[int]:
        return [self.random.randrange(self.runner.decoder.config.vocab_size) for _ in range(count)]

    def draw_chain(self, count: int) -> DraftTree:
        anchor_id, *drafted_ids = self.draw_ids(count)
        return DraftTree.chain(anchor_id, drafted_ids)

    def draw_tree(self, count: int) -> DraftTree:
        """A tree that branches from its third node on."""
        parents = [-1, 0, 0][:count]
        for last in range(2, count - 1):
            parents.append(last if self.random.random() < DEEPER else self.random.randint(0, last))
        return make_tree(self.draw_ids(count), parents)

    def _keep(self, row: Tensor) -> Tensor:
        self._num_not_finite += ~row.isfinite().all()
        return row.clone()


def make_tree(token_ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(token_ids), tuple(parents), tree_depths(tuple(parents)))


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """A tree as well: parents stand before their children."""
    return make_tree(tree.token_ids[:count], tree.parents[:count])
