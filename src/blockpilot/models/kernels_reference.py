"""What the kernels of a fused pass compute, in plain PyTorch: the truth that `gpu_kernels` is tested against.

Fused passes run with either set (the `Kernels` protocol); with this one they run on any device.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.noise import gumbel_noise
from blockpilot.models.trees_reference import Blocks, NextBlocks, Trees
from blockpilot.models.trees_reference import accept_trees as accept_trees
from blockpilot.models.trees_reference import grow_trees as grow_trees


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


@dataclass(frozen=True)
class Noise:
    """What the noise of R requests with n tokens each depends on."""

    temperatures: Tensor  # [R], 0: no noise, the best token
    seeds: Tensor  # [2, R] int32, low and high words
    positions: Tensor  # [R * n] of the tokens
    shift: int  # from a token's position to the one that its logits decide on


class Kernels(Protocol):
    def linear(self, x: Tensor, weight: Tensor, num_processors: int, *, out: Tensor | None = None) -> Parts: ...

    def rotate_store(
        self, qkv: Parts, positions: Tensor, table: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None,
        eps: float, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, num_heads: int, dtype: torch.dtype,
    ) -> Tensor: ...  # fmt: skip

    def rotate_attend(
        self, qkv: Parts, positions: Tensor, table: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None,
        eps: float, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, masks: Tensor, num_heads: int,
        dtype: torch.dtype, num_splits: int, context: int,
    ) -> Tensor: ...  # fmt: skip

    def add_norm(
        self, x: Tensor, delta: Parts | None, weight: Tensor, eps: float, convolution: Convolution | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def embed(self, ids: Tensor, table: Tensor) -> Tensor: ...

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor: ...

    def gate(self, gate_up: Parts, dtype: torch.dtype) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor, num_processors: int) -> Tensor: ...

    def norm_linear(
        self, x: Tensor, delta: Parts | None, norm: Tensor, eps: float, weight: Tensor, num_processors: int
    ) -> tuple[Tensor, Parts]: ...

    def norm_gated_linear(
        self, x: Tensor, delta: Parts | None, norm: Tensor, eps: float, weight: Tensor, num_processors: int
    ) -> tuple[Tensor, Tensor]: ...

    def norm_routed_mlp(
        self, x: Tensor, delta: Parts, norm: Tensor, eps: float, router: Tensor, gate_up: Tensor, down: Tensor,
        num_active: int, is_normalized: bool, num_processors: int,
    ) -> tuple[Tensor, Parts]: ...  # fmt: skip

    def store_context(
        self, projected: Parts, positions: Tensor, table: tuple[Tensor, Tensor], weights: Tensor, eps: float,
        rows: Tensor, slots: Tensor, starts: Tensor,
    ) -> None: ...  # fmt: skip

    def move_rows(self, rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None: ...

    def choose_splits(
        self, num_requests: int, num_kv_heads: int, num_queries: int, dim: int, num_processors: int, context: int
    ) -> int: ...

    def rank_tokens(
        self, logits: Tensor, num_best: int, names: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def send(self, source: Tensor, place: Tensor) -> None: ...

    def score_pairs(
        self, scores: Tensor, ids: Tensor, anchor_ids: Tensor, projected: Tensor, before: Tensor, behind: Tensor,
        temperatures: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def grow_trees(
        self, blocks: Blocks, weights: Tensor | None, temperatures: Tensor, limits: Tensor, anchors: Tensor,
        starts: Tensor, trees: Trees, parents: Tensor, report: Tensor, *, is_chain: bool,
    ) -> None: ...  # fmt: skip

    def accept_trees(
        self, best: Tensor, token_ids: Tensor, parents: Tensor, starts: Tensor, paths: Tensor, counts: Tensor,
        rows: Tensor, positions: Tensor, accepted: Tensor, blocks: NextBlocks,
    ) -> None: ...  # fmt: skip


def linear(x: Tensor, weight: Tensor, num_processors: int, *, out: Tensor | None = None) -> Parts:
    """x [N, size] times weight [rows, size]; with `out` the sum is there and not in parts."""
    product = F.linear(x, weight)
    return Parts(product if out is None else out.copy_(product))


def rotate_store(
    qkv: Parts, positions: Tensor, table: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, num_heads: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Queries [N, H, D], normalised and rotated; keys and values [slots, Hkv, capacity, D] get their new rows."""
    num_kv, dim = keys.shape[1], keys.shape[3]
    heads = qkv.total.float().view(len(positions), -1, dim)
    q, k, v = heads.split((num_heads, num_kv, num_kv), dim=1)
    if norms is not None:
        q, k = (F.rms_norm(x, (dim,), weight.float(), eps) for x, weight in ((q, norms[0]), (k, norms[1])))
    places = _places(slots, starts, len(positions))
    keys[places[0], :, places[1]] = _rotate(k, positions, table).to(keys.dtype)
    values[places[0], :, places[1]] = v.to(values.dtype)
    return _rotate(q, positions, table).to(dtype)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    masks: Tensor,
    num_splits: int,
    context: int,
) -> Tensor:
    """Mixed values [N, H * D] of queries [N, H, D]; `masks` [N, words] marks the new rows that each token sees.

    `num_splits` and `context`, the length to expect, only tell a GPU how to spread the work.
    """
    num_tokens, num_heads, _ = q.shape
    count, group = num_tokens // len(slots), num_heads // keys.shape[1]
    bits = torch.arange(count, device=q.device)
    is_marked = ((masks[:, bits // 32] >> (bits % 32).int()) & 1) == 1  # [N, count]
    outputs = []
    for request, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        own = slice(request * count, (request + 1) * count)
        seen = torch.cat((torch.ones(count, start, dtype=torch.bool, device=q.device), is_marked[own]), dim=1)
        k, v = (x[slot, :, : start + count].repeat_interleave(group, 0)[None] for x in (keys, values))
        mixed = F.scaled_dot_product_attention(q[own].transpose(0, 1)[None], k, v, attn_mask=seen)
        outputs.append(mixed[0].transpose(0, 1).reshape(count, -1))
    return torch.cat(outputs)


def rotate_attend(
    qkv: Parts, positions: Tensor, table: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, masks: Tensor, num_heads: int, dtype: torch.dtype,
    num_splits: int, context: int,
) -> Tensor:  # fmt: skip
    """`rotate_store` and `attend`."""
    q = rotate_store(qkv, positions, table, norms, eps, keys, values, slots, starts, num_heads, dtype)
    return attend(q, keys, values, slots, starts, masks, num_splits, context)


def add_norm(
    x: Tensor, delta: Parts | None, weight: Tensor, eps: float, convolution: Convolution | None = None
) -> tuple[Tensor, Tensor]:
    """x + delta (convolved, where asked), and its RMSNorm."""
    if delta is not None:
        added = delta.total.float()
        added = added if convolution is None else _convolve(added, convolution, side=1)
        x = (x.float() + added).to(x.dtype)
    return x, F.rms_norm(x, weight.shape, weight, eps)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """The rows of `table` that `ids` name."""
    return F.embedding(ids, table)


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    """The first side: what the sublayer reads."""
    return _convolve(x.float(), convolution, side=0).to(x.dtype)


def gated_linear(x: Tensor, weight: Tensor, num_processors: int) -> Tensor:
    """silu(gate) * up of x [N, size] and the stacked rows [2 * rows, size] of the two projections."""
    return gate(Parts(F.linear(x, weight)), x.dtype)


def norm_linear(
    x: Tensor, delta: Parts | None, norm: Tensor, eps: float, weight: Tensor, num_processors: int
) -> tuple[Tensor, Parts]:
    """x + delta, and the product of its RMSNorm."""
    total, normed = add_norm(x, delta, norm, eps)
    return total, linear(normed, weight, num_processors)


def norm_gated_linear(
    x: Tensor, delta: Parts | None, norm: Tensor, eps: float, weight: Tensor, num_processors: int
) -> tuple[Tensor, Tensor]:
    """x + delta, and the gated product of its RMSNorm."""
    total, normed = add_norm(x, delta, norm, eps)
    return total, gated_linear(normed, weight, num_processors)


def norm_routed_mlp(
    x: Tensor, delta: Parts, norm: Tensor, eps: float, router: Tensor, gate_up: Tensor, down: Tensor, num_active: int,
    is_normalized: bool, num_processors: int,
) -> tuple[Tensor, Parts]:  # fmt: skip
    """x + delta, and what each token's best experts make of its RMSNorm: gate_up [experts, 2 * F, H],
    down [experts, H, F]."""
    total, normed = add_norm(x, delta, norm, eps)
    logits = linear(normed, router, num_processors).total.float()
    shares, chosen = logits.softmax(dim=-1).topk(num_active, dim=-1)  # [N, A]
    if is_normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    parts = torch.zeros(num_active, len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        made = F.linear(gated_linear(normed[rows], gate_up[expert], num_processors), down[expert]).float()
        parts[ranks, rows] = made * shares[rows, ranks, None]
    return total, Parts(parts, num_active) if num_active > 1 else Parts(parts[0])


def gate(gate_up: Parts, dtype: torch.dtype) -> Tensor:
    gates, ups = gate_up.total.float().chunk(2, dim=-1)
    return (F.silu(gates) * ups).to(dtype)


def store_context(
    projected: Parts, positions: Tensor, table: tuple[Tensor, Tensor], weights: Tensor, eps: float, rows: Tensor,
    slots: Tensor, starts: Tensor,
) -> None:  # fmt: skip
    """A drafter's keys and values [N, layers * 2 * Hkv * D] into its cache rows [layers, 2, slots, Hkv, capacity, D].

    `weights` [layers, D] are the key norms.
    """
    num_layers, _, _, num_kv, _, dim = rows.shape
    heads = projected.total.float().view(len(positions), num_layers, 2, num_kv, dim)
    places = _places(slots, starts, len(positions))
    for layer in range(num_layers):
        keys = F.rms_norm(heads[:, layer, 0], (dim,), weights[layer].float(), eps)
        rows[layer, 0][places[0], :, places[1]] = _rotate(keys, positions, table).to(rows.dtype)
        rows[layer, 1][places[0], :, places[1]] = heads[:, layer, 1].to(rows.dtype)


def move_rows(rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    """Gather accepted rows [layers, 2, slots, Hkv, capacity, D] behind each slot's start: paths[r, i] to place i."""
    for slot, start, path, count in zip(slots.tolist(), starts.tolist(), paths, counts.tolist(), strict=True):
        own = rows[:, :, slot]
        own[..., start : start + count, :] = own.index_select(3, path[:count].long() + start)


def choose_splits(
    num_requests: int, num_kv_heads: int, num_queries: int, dim: int, num_processors: int, context: int
) -> int:
    return 1


def rank_tokens(
    logits: Tensor, num_best: int, names: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and log-probabilities [..., K] of the best tokens of logits [..., V], best first; float32.

    `names` [V] are the ids of the columns, where they are not their places. With `noise` scores are those that sampling
    compares; the last n tokens of each request have logits.
    """
    wide = logits.float() if noise is None else _add_noise(logits.float(), names, noise)
    scores, places = wide.topk(num_best, dim=-1) if num_best > 1 else wide.max(dim=-1, keepdim=True)  # first of equals
    ids = places if names is None else names[places]
    return scores, ids, scores - wide.logsumexp(dim=-1, keepdim=True)


def _add_noise(scores: Tensor, names: Tensor | None, noise: Noise) -> Tensor:
    num_requests, (num_rows, size) = len(noise.temperatures), scores.shape
    vocab_size = size if names is None else int(names.max()) + 1
    positions = (noise.positions.view(num_requests, -1)[:, -(num_rows // num_requests) :] + noise.shift).tolist()
    found = []
    for request, own in enumerate(scores.split(num_rows // num_requests)):
        temperature = float(noise.temperatures[request])
        low, high = (int(word) & 0xFFFFFFFF for word in noise.seeds[:, request])
        if temperature > 0:
            made = gumbel_noise(high << 32 | low, positions[request], vocab_size=vocab_size, device=scores.device)
            own = own / temperature + (made if names is None else made[:, names])
        found.append(own)
    return torch.cat(found)


def score_pairs(
    scores: Tensor, ids: Tensor, anchor_ids: Tensor, projected: Tensor, before: Tensor, behind: Tensor,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """DFlash 2's selector: log p(child | parent) after the anchor [N, K], and between positions [N, D-1, K, K].

    `scores`, `ids` [N, D, K] are the candidates, `projected` [N, D, rank] the hidden states, `before` and `behind`
    [V, rank] the codebooks of parents and children. A temperature divides what the selector adds, unless it is 0.
    """
    if temperatures is not None:
        divisors = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
        projected = (projected.float() / divisors[:, None, None]).to(projected.dtype)
    children = behind[ids].transpose(-1, -2)  # [N, D, rank, K]
    first = (before[anchor_ids.long()] * projected[:, 0])[:, None] @ children[:, 0]
    later = (before[ids[:, :-1]] * projected[:, 1:, None]) @ children[:, 1:]
    first, later = scores[:, 0] + first[:, 0].float(), scores[:, 1:, None] + later.float()
    return first.log_softmax(dim=-1), later.log_softmax(dim=-1)


def send(source: Tensor, place: Tensor) -> None:
    """Numbers from the host's memory to the device, or back."""
    place.copy_(source)


def _places(slots: Tensor, starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Slot and row of every token."""
    count = num_tokens // len(slots)
    rows = starts.long()[:, None] + torch.arange(count, device=slots.device)
    return slots.long().repeat_interleave(count), rows.flatten()


def _rotate(x: Tensor, positions: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part[positions.long()][:, None] for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _convolve(x: Tensor, convolution: Convolution, *, side: int) -> Tensor:
    num_tokens = len(x)
    shape = (num_tokens, 2, convolution.num_taps, convolution.num_groups)
    corrections = convolution.corrections.float().view(shape)[:, side].repeat_interleave(convolution.group_size, -1)
    kernel = convolution.base[side].float() + corrections  # [N, taps, H]
    out = kernel[:, 0] * x
    for tap in range(1, convolution.num_taps):
        earlier = F.pad(x, (0, 0, tap, 0))[:num_tokens] * (convolution.offsets >= tap)[:, None]
        out = out + kernel[:, tap] * earlier
    return out
