"""Acceptance: walk the draft tree along the tokens the target itself emits. Pure functions, no state.

`target_ids[i]` is the token the target emits after node i of the tree. Starting at the anchor, the walk follows the
child whose drafted token equals the target's token. Where no child does, the target's token is emitted all the same (it
comes for free) and the walk ends. The emitted tokens are therefore the target's own, whatever was drafted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from blockpilot.core.tree import DraftTree


class Acceptance(NamedTuple):
    path: tuple[int, ...]  # node indices whose keys and values stay: the anchor and the accepted nodes
    emitted_ids: tuple[int, ...]  # accepted tokens, then the target's own next token


def accept(tree: DraftTree, target_ids: Sequence[int]) -> Acceptance:
    """Children stand behind their parents, so one look at every node finds the whole path."""
    token_ids = tree.token_ids
    node, path, emitted = 0, [0], [target_ids[0]]
    for index, parent in enumerate(tree.parents):
        if parent == node and token_ids[index] == emitted[-1]:  # the first of two equal siblings: then `node` changes
            node = index
            path.append(index)
            emitted.append(target_ids[index])
    return Acceptance(tuple(path), tuple(emitted))
