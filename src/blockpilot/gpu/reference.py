"""What the kernels of a recorded pass compute, in plain PyTorch: the truth that `kernels/` is tested against.

With these recorded passes run on any device. `interface.py` says what each one does.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.core.draft import Draft
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.verification import accept
from blockpilot.gpu.interface import (
    AcceptedRows,
    AttentionLayer,
    CheckedTrees,
    ContextLayers,
    Convolution,
    Experts,
    NextBlocks,
    Noise,
    Norm,
    Parts,
    PassInputs,
    Rope,
    Selector,
    TreeLimits,
    TreeRules,
)
from blockpilot.gpu.plan import WORD, tree_shape
from blockpilot.models.dflash import convolve_block
from blockpilot.models.noise import gumbel_noise
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_tree


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Parts:
    product = F.linear(x, weight)
    return Parts(product if out is None else out.copy_(product))


def rotate_store(qkv: Parts, layer: AttentionLayer, positions: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    num_kv, dim = layer.keys.shape[1], layer.keys.shape[3]
    product = qkv.total.float()
    heads = (product if layer.bias is None else product + layer.bias.float()).view(len(positions), -1, dim)
    q, k, v = heads.split((layer.num_heads, num_kv, num_kv), dim=1)
    if layer.norms is not None:
        q, k = (
            F.rms_norm(x, (dim,), norm.weight.float(), norm.eps) for x, norm in zip((q, k), layer.norms, strict=True)
        )
    places = _places(slots, starts, len(positions), layer.keys.shape[2])
    layer.keys[places[0], :, places[1]] = _rotate(k, positions, layer.rope).to(layer.keys.dtype)
    layer.values[places[0], :, places[1]] = v.to(layer.values.dtype)
    return _rotate(q, positions, layer.rope).to(layer.keys.dtype)


def attend(q: Tensor, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
    num_tokens, num_heads, _ = q.shape
    count, group = num_tokens // len(inputs.slots), num_heads // layer.keys.shape[1]
    bits = torch.arange(count, device=q.device)
    if inputs.masks is None:
        is_marked = (bits[:, None] >= bits).repeat(len(inputs.slots), 1)  # [N, count]
    else:
        is_marked = ((inputs.masks[:, bits // WORD] >> (bits % WORD).int()) & 1) == 1
    outputs = []
    for request, (slot, start) in enumerate(zip(inputs.slots.tolist(), inputs.starts.tolist(), strict=True)):
        own = slice(request * count, (request + 1) * count)
        seen = torch.cat((torch.ones(count, start, dtype=torch.bool, device=q.device), is_marked[own]), dim=1)
        seen = seen[:, : layer.keys.shape[2]]  # padding may reach beyond a slot
        k, v = (x[slot, :, : seen.shape[1]].repeat_interleave(group, 0)[None] for x in (layer.keys, layer.values))
        mixed = F.scaled_dot_product_attention(q[own].transpose(0, 1)[None], k, v, attn_mask=seen)
        outputs.append(mixed[0].transpose(0, 1).reshape(count, -1))
    return torch.cat(outputs)


def lay_out(inputs: PassInputs) -> PassInputs:
    return inputs


def rotate_attend(qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
    q = rotate_store(qkv, layer, inputs.positions, inputs.slots, inputs.starts)
    return attend(q, layer, inputs)


def add_norm(
    x: Tensor, delta: Parts | None, norm: Norm, convolution: Convolution | None = None
) -> tuple[Tensor, Tensor]:
    if delta is not None:
        added = delta.total.float()
        added = added if convolution is None else _convolve(added, convolution, side=1)
        x = (x.float() + added).to(x.dtype)
    return x, F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    return _convolve(x.float(), convolution, side=0).to(x.dtype)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    return gate(Parts(F.linear(x, weight)), x.dtype)


def norm_linear(x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Parts]:
    total, normed = add_norm(x, delta, norm)
    return total, linear(normed, weight)


def norm_gated_linear(x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
    total, normed = add_norm(x, delta, norm)
    return total, gated_linear(normed, weight)


def norm_routed_mlp(x: Tensor, delta: Parts, norm: Norm, experts: Experts) -> tuple[Tensor, Parts]:
    router, gate_up, down, num_active, is_normalized = experts
    total, normed = add_norm(x, delta, norm)
    logits = linear(normed, router).total.float()
    shares, chosen = logits.softmax(dim=-1).topk(num_active, dim=-1)  # [N, A]
    if is_normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    parts = torch.zeros(num_active, len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        made = F.linear(gated_linear(normed[rows], gate_up[expert]), down[expert]).float()
        parts[ranks, rows] = made * shares[rows, ranks, None]
    return total, Parts(parts, num_active) if num_active > 1 else Parts(parts[0])


def gate(gate_up: Parts, dtype: torch.dtype) -> Tensor:
    gates, ups = gate_up.total.float().chunk(2, dim=-1)
    return (F.silu(gates) * ups).to(dtype)


def store_context(projected: Parts, layers: ContextLayers, positions: Tensor, slots: Tensor, starts: Tensor) -> None:
    rows = layers.rows
    num_layers, _, _, num_kv, _, dim = rows.shape
    heads = projected.total.float().view(len(positions), num_layers, 2, num_kv, dim)
    places = _places(slots, starts, len(positions), rows.shape[4])
    for layer in range(num_layers):
        keys = F.rms_norm(heads[:, layer, 0], (dim,), layers.norms.weight[layer].float(), layers.norms.eps)
        rows[layer, 0][places[0], :, places[1]] = _rotate(keys, positions, layers.rope).to(rows.dtype)
        rows[layer, 1][places[0], :, places[1]] = heads[:, layer, 1].to(rows.dtype)


def move_rows(rows: Tensor, slots: Tensor, starts: Tensor, paths: Tensor, counts: Tensor) -> None:
    for slot, start, path, count in zip(slots.tolist(), starts.tolist(), paths, counts.tolist(), strict=True):
        own = rows[:, :, slot]
        own[..., start : start + count, :] = own.index_select(3, path[:count].long() + start)


def rank_tokens(
    logits: Tensor,
    num_best: int,
    names: Tensor | None = None,
    noise: Noise | None = None,
    *,
    is_weighed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
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
    scores: Tensor,
    ids: Tensor,
    anchor_ids: Tensor,
    projected: Tensor,
    selector: Selector,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    before, behind = selector
    if temperatures is not None:
        divisors = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
        projected = (projected.float() / divisors[:, None, None]).to(projected.dtype)
    children = behind[ids].transpose(-1, -2)  # [N, D, rank, K]
    first = (before[anchor_ids.long()] * projected[:, 0])[:, None] @ children[:, 0]
    later = (before[ids[:, :-1]] * projected[:, 1:, None]) @ children[:, 1:]
    first, later = scores[:, 0] + first[:, 0].float(), scores[:, 1:, None] + later.float()
    return first.log_softmax(dim=-1), later.log_softmax(dim=-1)


def send(source: Tensor, place: Tensor) -> None:
    place.copy_(source)


def grow_trees(
    draft: Draft[Tensor], rules: TreeRules, limits: TreeLimits, trees: PassInputs, parents: Tensor, report: Tensor
) -> None:
    """By the pilots' own growth. Paths are float64, a GPU's float32: nearly equal nodes may come in another order."""
    count = parents.shape[1]
    arrays = draft.map(lambda part: part.cpu().numpy())
    for request, (most_nodes, depth) in enumerate(limits.limits.tolist()):
        own = Draft(*(None if part is None else part[request] for part in arrays.arrays))
        calibration = None
        if rules.weights is not None:
            calibration = Calibration(rules.weights[int(limits.temperatures[request] > 0)].cpu().numpy())
        costs = falling_costs(min(most_nodes, count - 1))
        growth = GrowthRules(costs, depth, calibration, width=own.width, is_chain=rules.is_chain)
        tree, promised, head = grow_tree(own, int(limits.anchors[request]), growth)
        _write_tree(trees, request, tree, int(limits.starts[request]))
        _write(parents[request], tree.parents, -1)
        _write(report[request], [len(tree), tree.max_depth, promised, *head])


def _write_tree(trees: PassInputs, request: int, tree: DraftTree, start: int) -> None:
    count = trees.count
    own = slice(request * count, (request + 1) * count)
    offsets, masks = (torch.frombuffer(bytearray(part), dtype=torch.int32) for part in tree_shape(tree.parents, count))
    _write(trees.token_ids[own], tree.token_ids)
    trees.positions[own] = (offsets + start).to(trees.positions.device)
    assert trees.masks is not None and trees.branches is not None
    trees.masks[own] = masks.view(count, -1).to(trees.masks.device)
    trees.branches[request] = int(not tree.is_chain)
    trees.starts[request] = start


def accept_trees(checked: CheckedTrees, kept: AcceptedRows, accepted: Tensor, following: NextBlocks) -> None:
    num_requests, count = checked.parents.shape
    num_rows = len(kept.rows) // num_requests
    best, ids = (part.view(num_requests, count).tolist() for part in (checked.best, checked.token_ids))
    for request, parents in enumerate(checked.parents.tolist()):
        size = max([0, *(node for node, parent in enumerate(parents) if parent >= 0)]) + 1
        tree = DraftTree.build(ids[request][0], list(zip(parents[1:size], ids[request][1:size], strict=True)))
        path, emitted_ids = accept(tree, best[request])
        anchor, start = request * count, int(checked.starts[request])
        own = slice(request * num_rows, (request + 1) * num_rows)
        _write(kept.paths[request], path)
        kept.counts[request] = len(path)
        _write(kept.rows[own], [anchor + node for node in path[:num_rows]], anchor)
        _write(kept.positions[own], range(start, start + num_rows))
        _write(accepted[request], [len(path), *emitted_ids[:num_rows]])
        shift = 0 if int(following.slots[request]) == following.spare_slot else len(path)
        following.next_ids[own][0] = emitted_ids[-1]
        following.next_positions[own] = (following.positions[own] + shift).to(following.next_positions.device)
        following.next_starts[request] = start + shift


def _write(place: Tensor, numbers: Iterable[float], rest: float = 0) -> None:
    """Numbers into a row, and `rest` behind them."""
    found = torch.tensor(list(numbers), dtype=place.dtype)
    place.fill_(rest)
    place[: len(found)] = found.to(place.device)


def _places(slots: Tensor, starts: Tensor, num_tokens: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Slot and row of every token; that of padding beyond the slot is its last."""
    count = num_tokens // len(slots)
    rows = (starts.long()[:, None] + torch.arange(count, device=slots.device)).clamp(max=capacity - 1)
    return slots.long().repeat_interleave(count), rows.flatten()


def _rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    cos, sin = (part[positions.long()][:, None] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _convolve(x: Tensor, convolution: Convolution, *, side: int) -> Tensor:
    shape = (len(x), 2, convolution.num_taps, convolution.num_groups)
    corrections = convolution.corrections.float().view(shape)[:, side]
    return convolve_block(x, convolution.base[side].float(), corrections, convolution.offsets)
