"""Growing draft trees out of a draft's candidates, or pruning the tree that the drafter grew itself.

Nodes are taken likeliest first, parents before children: a number of them, or as many as bring the most tokens per
millisecond. Out of candidates the loops are in `loops/growth.py`.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import FloatArray, HostDraft, IntArray
from blockpilot.core.tree import DraftTree, tree_depths
from blockpilot.pilots.base import Selection
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.copies import NOTHING_COPIED, Copied
from blockpilot.pilots.forecast import HEAD, load_loops

Values = NDArray[np.float64]
FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)
NO_FIRST, NO_PAIRS = np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32)
NO_WEIGHTS = np.zeros((0, 0), np.float32)
ROUNDING = 1e-12
MAX_WIDTH = 16  # candidates per position a tree may branch into


class GrowthRules(NamedTuple):
    """How a tree grows."""

    costs: tuple[Values, Values]  # milliseconds of a step that checks 0, 1, .. nodes, and their `smallest_rises`
    depth: int  # of the deepest node that may be taken
    calibration: Calibration | None = None  # None: scores are probabilities
    trust: float = 1.0  # what a promised token is worth
    width: int = MAX_WIDTH
    is_chain: bool = False  # only the best child of each node
    copied: Copied = NOTHING_COPIED  # what the request's own text offers


class Nodes(NamedTuple):
    """Nodes behind an anchor, likeliest first; the anchor is parent 0."""

    parents: list[int]
    token_ids: list[int]
    depths: list[int]
    paths: list[float]  # how likely each and all above it are right
    promised: float
    head: list[float]


def grow_chain(draft: HostDraft, anchor_id: int, max_nodes: int) -> DraftTree:
    """The single best path: at every position the likeliest child of the one before."""
    if draft.tree is not None:
        return DraftTree.chain(anchor_id, [draft.tree.token_ids[node] for node in _best_path(draft)[:max_nodes]])
    return DraftTree.chain(anchor_id, load_loops().best_chain(*plain_arrays(draft), max_nodes).tolist())


def grow_tree(draft: HostDraft, anchor_id: int, rules: GrowthRules) -> Selection:
    """The nodes that maximise expected tokens / milliseconds."""
    if draft.tree is None:
        found, _, promised, head = _grow(draft, rules)
        found[1, 0] = anchor_id
        parents, token_ids, depths = found.tolist()
        return Selection(DraftTree(tuple(token_ids), tuple(parents), tuple(depths)), promised, head)
    nodes = _prune(draft, rules)
    tree = DraftTree((anchor_id, *nodes.token_ids), (-1, *nodes.parents), (0, *nodes.depths))
    return Selection(tree.up_to(rules.depth), nodes.promised, nodes.head)


def grow_nodes(draft: HostDraft, rules: GrowthRules) -> Nodes:
    if draft.tree is not None:
        return _prune(draft, rules)
    found, paths, promised, head = _grow(draft, rules)
    parents, token_ids, depths = found[:, 1:].tolist()
    return Nodes(parents, token_ids, depths, paths[1:].tolist(), promised, head)


def _grow(draft: HostDraft, rules: GrowthRules) -> tuple[IntArray, Values, float, list[float]]:
    """Parents, token ids and depths [3, nodes + 1] behind those of the anchor, which has no token id yet; how likely
    each and all above it are right; what they promise; the head."""
    step_ms, rises = rules.costs
    copied_ids, copied = rules.copied
    depth = max(min(rules.depth, max(draft.num_positions, len(copied_ids))), 0)
    found, paths = np.empty((3, len(step_ms)), INT), np.empty(len(step_ms))
    weights = NO_WEIGHTS if rules.calibration is None else rules.calibration.plain_weights
    shape = min(draft.width, rules.width), depth, rules.is_chain
    count, promised, head = load_loops().grow(
        found, paths, *plain_arrays(draft), weights, copied_ids, copied, step_ms, rises, rules.trust, *shape
    )
    return found[:, : count + 1], paths[: count + 1], promised, list(head[:depth])


def smallest_rises(step_ms: Values) -> Values:
    """For n = 0, 1, ..: the least that nodes from n on, however many, add to a step's milliseconds per node.

    A little less, so that growth does not end where rounding alone decides.
    """
    numbers = np.arange(float(len(step_ms)))
    ahead = numbers - numbers[:-1, None]  # [from, to]
    rises = (step_ms - step_ms[:-1, None]) / np.where(ahead > 0, ahead, 1.0)
    smallest: Values = rises.min(axis=1, where=ahead > 0, initial=np.inf) - ROUNDING * step_ms[-1]
    return smallest


@lru_cache
def falling_costs(num_nodes: int) -> tuple[Values, Values]:
    """Costs at which every further node pays, and their smallest rises."""
    step_ms = 1 / np.arange(1.0, num_nodes + 2)
    return step_ms, smallest_rises(step_ms)


def plain_arrays(draft: HostDraft) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
    """The arrays themselves, or copies in the one form that loops are compiled for."""
    ids, log_probs, first, pairwise = draft.arrays
    if first is None or pairwise is None:
        first, pairwise = NO_FIRST, NO_PAIRS
    if not all(part.dtype is FLOAT and part.flags.carray for part in (log_probs, first, pairwise)):
        log_probs, first, pairwise = (np.array(part, FLOAT, order="C") for part in (log_probs, first, pairwise))
    if ids.dtype is not INT or not ids.flags.carray:
        ids = np.array(ids, INT, order="C")
    return ids, log_probs, first, pairwise


def _prune(draft: HostDraft, rules: GrowthRules) -> Nodes:
    """The same out of the drafter's own tree, as it is scored. No child outscores its parent, so parents come first."""
    tree, scores, best = draft.tree, _path_scores(draft), _best_path(draft)
    assert tree is not None
    kept = np.array(best) - 1 if rules.is_chain else np.argsort(-scores, kind="stable")
    kept = kept[: len(rules.costs[0]) - 1]
    paths = np.exp(scores[kept])
    promised = np.concatenate(([0.0], np.cumsum(paths, dtype=np.float64)))
    count = int(((1 + rules.trust * promised) / rules.costs[0][: len(promised)]).argmax())
    nodes = (kept[:count] + 1).tolist()
    places = {0: 0} | {node: place for place, node in enumerate(nodes, start=1)}
    parents = [places[tree.parents[node]] for node in nodes]
    depths, ids = tree_depths((-1, *parents))[1:], [tree.token_ids[node] for node in nodes]
    head = np.exp(scores[np.array(best[:HEAD], dtype=np.int64) - 1]).tolist()
    return Nodes(parents, ids, list(depths), paths[:count].tolist(), float(promised[count]), head)


def _path_scores(draft: HostDraft) -> FloatArray:
    """Sum of log-probabilities [n] from the anchor to each node; never above the parent's."""
    assert draft.tree is not None and draft.node_log_probs is not None
    scores = [np.float32(0)]
    for parent, step in zip(draft.tree.parents[1:], np.minimum(draft.node_log_probs, 0), strict=True):
        scores.append(scores[parent] + step)
    return np.array(scores[1:], dtype=np.float32)


def _best_path(draft: HostDraft) -> list[int]:
    """Nodes of the drafter's own tree: at every depth the likeliest child of the one before, the first of equals."""
    assert draft.tree is not None and draft.node_log_probs is not None
    log_probs = draft.node_log_probs.tolist()
    best: dict[int, int] = {}  # parent -> its likeliest child
    for node, parent in enumerate(draft.tree.parents[1:], start=1):
        if parent not in best or log_probs[node - 1] > log_probs[best[parent] - 1]:
            best[parent] = node
    path: list[int] = []
    at = 0
    while at in best:
        at = best[at]
        path.append(at)
    return path
