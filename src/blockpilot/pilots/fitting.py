"""Fitting pilots to traces: plain arrays in, what a pilot stores out.

    fit_calibration   from a drafter's scores to probabilities, on the paths that are right
    fit_forecast      what the next draft brings, from walks through the answers with the pilot's own memory

PyTorch is imported inside functions: reading traces does not need it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import Draft, FloatArray, HostDraft
from blockpilot.pilots.calibration import IDENTITY, Calibration, feature_rows
from blockpilot.pilots.forecast import FEATURES, NUM_LEVELS, Forecast, features
from blockpilot.pilots.growth import GrowthRules, Nodes, falling_costs, grow_nodes
from blockpilot.pilots.memory import Recent

if TYPE_CHECKING:
    from torch import Tensor

ABSENT = 255  # true rank of a token that is not among the candidates, or beyond the answer's end
Floats = NDArray[np.floating[Any]]
_WALK_NODES = 8  # nodes a walk checks per step, about as many as pay on common machines


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What a drafter offered at one draft size, at N anchors: D = size - 1 depths, K candidates, best first."""

    log_probs: Floats  # [N, D, K]
    true_ranks: NDArray[np.uint8]  # [N, D], rank of the answer's own token
    first: Floats | None = None  # [N, K], after the anchor; None where positions are independent (plain DFlash)
    pairwise: Floats | None = None  # [N, D-1, K, K], after each candidate of the position before
    starts: Sequence[int] = (0,)  # where each answer's anchors begin, one answer after the other

    def __len__(self) -> int:
        return len(self.true_ranks)

    @property
    def is_paired(self) -> bool:
        return self.first is not None and self.pairwise is not None

    def candidates(self, anchor: int, width: int | None = None) -> HostDraft:
        """The first `width` candidates of every position. Token ids are ranks: pilots only hand them on."""
        log_probs = self.log_probs[anchor, :, :width].astype(np.float32)
        ranks = np.broadcast_to(np.arange(log_probs.shape[1]), log_probs.shape)
        if self.first is None or self.pairwise is None:
            return Draft(ranks, log_probs)
        first, pairwise = self.first[anchor, :width], self.pairwise[anchor, :, :width, :width]
        return Draft(ranks, log_probs, first.astype(np.float32), pairwise.astype(np.float32))


def fit_calibration(drafts: Sequence[Drafts], *, l2: float = 1e-3, max_rows: int = 400_000) -> Calibration:
    """One model for all draft sizes: weights shared by all depths plus what is special at each, kept small by `l2`."""
    parts = [calibration_rows(one) for one in drafts]
    features, hits, depths = (np.concatenate([part[index] for part in parts]) for index in range(3))
    if len(hits) > max_rows:
        kept = np.random.default_rng(0).choice(len(hits), max_rows, replace=False)
        features, hits, depths = features[kept], hits[kept], depths[kept]
    num_depths = int(depths.max()) + 1

    import torch

    x, y, rows = (torch.from_numpy(array) for array in (features, hits.astype(np.float32), depths))
    start = torch.tensor(IDENTITY)
    shared = start.clone().requires_grad_()
    special = torch.zeros(num_depths, len(IDENTITY), requires_grad=True)

    def loss() -> "Tensor":
        logits = x @ shared + (x * special[rows]).sum(dim=-1)
        error = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        return error + l2 * ((special**2).sum() / num_depths + (shared - start).square().sum() / 10)

    _minimise(loss, [shared, special])
    return Calibration((shared + special).detach().numpy())


def calibration_rows(drafts: Drafts) -> tuple[FloatArray, NDArray[np.bool_], NDArray[np.int64]]:
    """Features [M, F], hit [M] and depth [M] of every child whose parent lies on the answer."""
    alive = np.ones(len(drafts), dtype=np.bool_)
    features, hits, depths = [], [], []
    for depth in range(drafts.log_probs.shape[1]):
        anchors = np.flatnonzero(alive)
        parents = drafts.true_ranks[anchors, depth - 1].astype(np.int64) if depth else np.zeros(len(anchors), np.int64)
        marginals = drafts.log_probs[anchors, depth].astype(np.float32)
        scores = marginals
        if drafts.first is not None and drafts.pairwise is not None:
            scores = drafts.pairwise[anchors, depth - 1, parents] if depth else drafts.first[anchors]
        rows = feature_rows(scores.astype(np.float32), marginals, parents)
        true_ranks = drafts.true_ranks[anchors, depth].astype(np.int64)
        features.append(rows.reshape(-1, rows.shape[-1]))
        hits.append((np.arange(rows.shape[1]) == true_ranks[:, None]).reshape(-1))
        depths.append(np.full(len(hits[-1]), depth))
        alive[anchors] = true_ranks < rows.shape[1]
    return np.concatenate(features), np.concatenate(hits), np.concatenate(depths)


def fit_forecast(
    drafts: Mapping[int, Drafts],
    calibration: Calibration,
    *,
    is_chain: bool = False,
    num_nodes: int = 63,
    num_walks: int = 2,
    l2: float = 1e-3,
) -> Forecast:
    """`drafts` by draft size. Every feature's weight is smooth in the node's rank r: a mix of 1, log r and r."""
    sizes = tuple(sorted(drafts))
    weights = []
    for size in sizes:
        steps = walk(drafts[size], calibration, is_chain=is_chain, num_nodes=num_nodes, num_walks=num_walks)
        limit = min(num_nodes, size - 1) if is_chain else num_nodes
        levels = [
            _fit_ranks(steps.features[rows], steps.hits[rows, :limit], num_nodes=num_nodes, l2=l2)
            for rows in steps.split(NUM_LEVELS)
        ]
        fitted = np.stack(levels)  # [levels, nodes, F]
        if is_chain:
            fitted[:, limit:] = [-30.0] + [0.0] * (len(FEATURES) - 1)  # no such depth
        weights.append(fitted)
    return Forecast(sizes, is_chain, num_nodes, np.stack(weights))


@dataclass(frozen=True)
class Steps:
    """Drafted steps of walks through answers."""

    features: FloatArray  # [M, F], what the request remembered before
    hits: NDArray[np.bool_]  # [M, n], which of the draft's nodes, in order, were right
    promised: NDArray[np.float64]  # [M], tokens that all nodes together promised

    def split(self, num_levels: int) -> list[NDArray[np.int64]]:
        """Rows of poor to good drafts, in equal groups: by promised tokens minus a linear fit to the features."""
        usual = self.features @ np.linalg.lstsq(self.features, self.promised, rcond=None)[0]
        return np.array_split(np.argsort(self.promised - usual, kind="stable"), num_levels)


def walk(drafts: Drafts, calibration: Calibration, *, is_chain: bool, num_nodes: int, num_walks: int = 1) -> Steps:
    """Steps through all answers with the pilot's memory. Walk w starts w anchors late: more steps of the same text."""
    rows = [
        row
        for start, end in pairwise([*drafts.starts, len(drafts)])
        for anchor in range(start, min(start + num_walks, end))
        for row in _walk_once(drafts, calibration, range(anchor, end), is_chain, num_nodes)
    ]
    features, hits, promised = zip(*rows, strict=True)
    return Steps(np.stack(features), np.stack(hits), np.array(promised))


def _walk_once(
    drafts: Drafts, calibration: Calibration, anchors: range, is_chain: bool, num_nodes: int
) -> Iterator[tuple[FloatArray, NDArray[np.bool_], float]]:
    recent = Recent()
    anchor = anchors.start
    while anchor < anchors.stop:
        draft = drafts.candidates(anchor)
        rules = GrowthRules(
            falling_costs(num_nodes), draft.num_positions, calibration, width=draft.width, is_chain=is_chain
        )
        nodes = grow_nodes(draft, rules)
        hit = mark_hits(nodes, drafts.true_ranks[anchor], num_nodes)
        yield features(recent), hit, sum(nodes.paths)
        emitted = 1 + int(hit[:_WALK_NODES].sum())
        recent.record_drafts([nodes.head])
        depth = max(nodes.depths[:_WALK_NODES], default=0)
        recent.record_steps([(emitted, depth, sum(nodes.paths[:_WALK_NODES]))])
        anchor += emitted


def mark_hits(nodes: Nodes, true_ranks: NDArray[np.uint8], num_nodes: int) -> NDArray[np.bool_]:
    """Which nodes [num_nodes] lie on the answer."""
    hit = np.zeros(num_nodes + 1, dtype=np.bool_)
    hit[0] = True  # the anchor
    for index, (parent, rank, depth) in enumerate(zip(nodes.parents, nodes.token_ids, nodes.depths, strict=True), 1):
        hit[index] = hit[parent] and rank == true_ranks[depth - 1]
    return hit[1:]


def _fit_ranks(features: FloatArray, hits: NDArray[np.bool_], *, num_nodes: int, l2: float) -> FloatArray:
    """Weights [num_nodes, F] from steps [M, F] and hits [M, n]."""
    import torch

    ranks = np.arange(1, num_nodes + 1, dtype=np.float32)
    basis = torch.from_numpy(np.stack([np.ones_like(ranks), np.log(ranks), ranks / 8], axis=1))  # [num_nodes, 3]
    x, y = torch.from_numpy(features), torch.from_numpy(hits.astype(np.float32))
    inner = basis[: hits.shape[1]]
    weights = torch.zeros(3, features.shape[1], requires_grad=True)

    def loss() -> "Tensor":
        logits = x @ weights.T @ inner.T
        error = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        return error + l2 * (weights**2).mean()

    _minimise(loss, [weights])
    fitted: FloatArray = (basis @ weights).detach().numpy()
    return fitted


def _minimise(loss: "Callable[[], Tensor]", parameters: "Sequence[Tensor]") -> None:
    """Full-batch L-BFGS."""
    import torch

    optimizer = torch.optim.LBFGS(
        parameters, max_iter=200, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def evaluate() -> "Tensor":
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(evaluate)
