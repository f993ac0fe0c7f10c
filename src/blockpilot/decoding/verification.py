"""Acceptance: walk the draft tree along the tokens the target itself emits. Pure functions, no state.

`target_ids[i]` is the token the target emits after node i of the tree. Starting at the anchor, the walk follows the
child whose drafted token equals the target's token. Where no child does, the target's token is emitted all the same (it
comes for free) and the walk ends. The emitted tokens are therefore the target's own, whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.core.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    path: tuple[int, ...]  # node indices whose keys and values stay: the anchor and the accepted nodes
    emitted_ids: tuple[int, ...]  # accepted tokens, then the target's own next token


def accept(tree: DraftTree, target_ids: Sequence[int]) -> Acceptance:
    children = tree.children()
    path, emitted, node = [0], [], 0
    while True:
        token_id = target_ids[node]
        emitted.append(token_id)
        child = children[node].get(token_id)
        if child is None:
            return Acceptance(tuple(path), tuple(emitted))
        path.append(child)
        node = child
