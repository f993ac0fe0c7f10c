"""What a pass on a device is made of: the kernels, and the arrays that they read and write.

`kernels/` has them in Triton, `reference.py` in plain PyTorch. Recorded passes run with either.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockpilot.core.draft import Draft
from blockpilot.pilots.forecast import HEAD

REPORT = 3 + HEAD  # numbers that growth tells of a tree


@dataclass(frozen=True)
class PassInputs:
    """What a pass reads, all int32: R requests of n tokens each, N = R * n. On the device, or staged on the host.

    Padding tokens have id 0 and the position of the first token, and see it alone.
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [R]
    starts: Tensor  # [R] rows already in the slot
    masks: Tensor | None  # [N, words] which of the request's n new rows a token sees, a bit each; None: up to itself
    branches: Tensor | None = None  # [R] not 0: its masks are a tree's that is no chain; None: there is no such tree
    context: int = 2048  # the longest slot the pass is made for, before its own tokens
    tail_rows: Tensor | None = None  # [N, columns] where the keys of a branching tree's nodes lie, by `Kernels.lay_out`

    @property
    def num_requests(self) -> int:
        return len(self.slots)

    @property
    def count(self) -> int:
        return len(self.token_ids) // len(self.slots)


@dataclass(frozen=True)
class Parts:
    """A product whose terms still have to be added: [parts, N, rows], or [N, rows] where there is one."""

    values: Tensor
    num_parts: int = 1

    @property
    def stride(self) -> int:
        return self.values.stride(0) if self.num_parts > 1 else 0

    @property
    def total(self) -> Tensor:
        return self.values.sum(0) if self.num_parts > 1 else self.values


class Norm(NamedTuple):
    weight: Tensor
    eps: float


class Rope(NamedTuple):
    cos: Tensor  # [capacity, D/2], float32
    sin: Tensor


class AttentionLayer(NamedTuple):
    """The part of attention that no pass changes, and the cache rows of one layer."""

    keys: Tensor  # [slots, Hkv, capacity, D]
    values: Tensor
    rope: Rope
    norms: tuple[Norm, Norm] | None  # of queries and keys
    num_heads: int
    bias: Tensor | None = None  # [(H + 2 Hkv) * D], added to the product in float32


class ContextLayers(NamedTuple):
    """The cache of a drafter that stores keys and values of all layers at once."""

    rows: Tensor  # [layers, 2, slots, Hkv, capacity, D]
    rope: Rope
    norms: Norm  # of keys, [layers, D]


class Experts(NamedTuple):
    router: Tensor  # [experts, H]
    gate_up: Tensor  # [experts, 2 * F, H]
    down: Tensor  # [experts, H, F]
    num_active: int
    is_normalized: bool


@dataclass(frozen=True)
class Convolution:
    """DFlash 2's two-sided convolution around a sublayer: kernels [2, taps, H], and what each token adds to them."""

    base: Tensor
    corrections: Tensor  # [N, 2 * taps * groups]
    offsets: Tensor  # [N] place in the block
    group_size: int

    @property
    def num_taps(self) -> int:
        return self.base.shape[1]

    @property
    def num_groups(self) -> int:
        return self.base.shape[2] // self.group_size


class Selector(NamedTuple):
    """DFlash 2's codebooks [V, rank] of parents and of children."""

    before: Tensor
    behind: Tensor


@dataclass(frozen=True)
class Noise:
    """What the noise of R requests with n tokens each depends on."""

    temperatures: Tensor  # [R], 0: no noise, the best token
    seeds: Tensor  # [2, R] int32, low and high words
    positions: Tensor  # [R * n] of the tokens
    shift: int  # from a token's position to the one that its logits decide on


class TreeRules(NamedTuple):
    """How nodes are chosen."""

    weights: Tensor | None  # [2, depths, 6], calibrations of greedy and of sampled requests; None: no calibration
    is_chain: bool  # no node has a sibling


class TreeLimits(NamedTuple):
    """What bounds the trees of R requests, and where they stand."""

    temperatures: Tensor  # [R]
    limits: Tensor  # [R, 2] the most nodes, and the greatest depth
    anchors: Tensor  # [R] the anchors' token ids
    starts: Tensor  # [R] the anchors' positions


class CheckedTrees(NamedTuple):
    """Trees of n tokens each that a pass has checked."""

    best: Tensor  # [R * n] the target's token after each node
    token_ids: Tensor  # [R * n]
    parents: Tensor  # [R, n], -1: no node's
    starts: Tensor  # [R] where a drafter's rows end


class AcceptedRows(NamedTuple):
    """The accepted nodes of R requests, of m positions with their anchor."""

    paths: Tensor  # [R, W] nodes, the anchor first
    counts: Tensor  # [R] their number
    rows: Tensor  # [R * m] the same among the tokens of all requests; the anchor where there are no more
    positions: Tensor  # [R * m] places behind each start


@dataclass(frozen=True)
class NextBlocks:
    """The blocks of m tokens that come after accepted ones: what the last were, and where the next are written; int32.

    A block moves on by as many tokens as were accepted, and begins with the last of them. Those of the spare slot stay.
    """

    slots: Tensor  # [R]
    positions: Tensor  # [R * m]
    spare_slot: int
    next_ids: Tensor  # [R * m], only each first one is written
    next_positions: Tensor  # [R * m]
    next_starts: Tensor  # [R]


class Kernels(Protocol):
    def linear(self, x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Parts:
        """x [N, size] times weight [rows, size]; with `out` the sum is there and not in parts."""

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) * up of x [N, size] and the stacked rows [2 * rows, size] of the two projections."""

    def norm_linear(self, x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Parts]:
        """x + delta, and the product of its RMSNorm."""

    def norm_gated_linear(self, x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and the gated product of its RMSNorm."""

    def norm_routed_mlp(self, x: Tensor, delta: Parts, norm: Norm, experts: Experts) -> tuple[Tensor, Parts]:
        """x + delta, and what each token's best experts make of its RMSNorm."""

    def add_norm(
        self, x: Tensor, delta: Parts | None, norm: Norm, convolution: Convolution | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta (convolved, where asked), and its RMSNorm."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows of `table` that `ids` name. It starts when everything before it has ended."""

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        """The convolution's first side: what the sublayer reads."""

    def rotate_store(
        self, qkv: Parts, layer: AttentionLayer, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> Tensor:
        """Queries [N, H, D], normalised and rotated; the cache gets the new rows of keys and values."""

    def lay_out(self, inputs: PassInputs) -> PassInputs:
        """The inputs with what all layers read of trees; called before everything else."""

    def rotate_attend(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
        """Mixed values [N, H * D]; the cache gets the new rows."""

    def store_context(
        self, projected: Parts, layers: ContextLayers, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> None:
        """A drafter's keys and values [N, layers * 2 * Hkv * D] into its cache."""

    def move_rows(self, rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
        """Gather accepted rows [layers, 2, slots, Hkv, capacity, D] behind each slot's start: paths[r, i] to i."""

    def rank_tokens(
        self,
        logits: Tensor,
        num_best: int,
        names: Tensor | None = None,
        noise: Noise | None = None,
        *,
        is_weighed: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, ids and log-probabilities [N, K] of the best tokens of logits [N, V], best first; float32.

        `names` [V] are the ids of the columns, where they are not their places. With `noise` scores are those that
        sampling compares; the last n tokens of each request have logits. Unless `is_weighed`, there are no
        log-probabilities.
        """

    def score_pairs(
        self,
        scores: Tensor,
        ids: Tensor,
        anchor_ids: Tensor,
        projected: Tensor,
        selector: Selector,
        temperatures: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """DFlash 2's selector: log p(child | parent) after the anchor [N, K], and between positions [N, D-1, K, K].

        `scores`, `ids` [N, D, K] are the candidates, `projected` [N, D, rank] the hidden states. A temperature divides
        what the selector adds, unless it is 0.
        """

    def send(self, source: Tensor, place: Tensor) -> None:
        """Numbers from the host's memory to the device, or back."""

    def grow_trees(
        self,
        draft: Draft[Tensor],
        rules: TreeRules,
        limits: TreeLimits,
        trees: PassInputs,
        parents: Tensor,
        report: Tensor,
    ) -> None:
        """The likeliest nodes of each draft, best first, into `trees` and `parents` [R, n]; -1 is no node's parent.

        `report` [R, REPORT] gets the number of tokens, the depth, the sum of the nodes' paths, and how likely the best
        chain is right up to each of its first positions.
        """

    def accept_trees(self, checked: CheckedTrees, kept: AcceptedRows, accepted: Tensor, following: NextBlocks) -> None:
        """Walk every tree along the tokens that the target has after each node.

        `accepted` [R, 1 + m] gets the number of nodes on the way and the tokens that they emit, `kept` where they are.
        """


def find_kernels(device: torch.device) -> Kernels:
    """Those of a device: compiled on a GPU, the reference anywhere else."""
    if device.type == "cuda":
        from blockpilot.gpu import kernels

        return kernels
    from blockpilot.gpu import reference

    return reference
