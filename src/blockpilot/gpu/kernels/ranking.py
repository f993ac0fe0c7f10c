"""From logits to tokens: the best ones, DFlash 2's selector, the noise of sampling."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from blockpilot.gpu.interface import Noise, Selector
from blockpilot.gpu.kernels.launching import launch, wait
from blockpilot.gpu.schedule import MIN_TILE

CHUNK = 1024  # tokens of a row of logits that one program ranks; one warp then never waits for another


@triton.jit
def _pack(values, places):  # type: ignore[no-untyped-def]
    """bfloat16 numbers and their places (below 65536) as one integer each, in the order of ranks: of equals the first
    is the greatest. The largest of many integers is found in a fifth of the time that a number with its place takes."""
    bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits) * 65536 + (65535 - places)


@triton.jit
def _unpack(keys):  # type: ignore[no-untyped-def]
    bits = keys >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True).to(tl.float32), 65535 - (keys & 65535)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of(x, places, is_narrow, BEST: tl.constexpr, PAD_BEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best numbers and their places, [PAD_BEST] each, best first. `places` are 0, 1, 2 ...; bfloat16 is narrow."""
    ranks = tl.arange(0, PAD_BEST)
    values = tl.zeros([PAD_BEST], tl.float32)
    indices = tl.zeros([PAD_BEST], tl.int32)
    if is_narrow:
        packed = _pack(x, places)
        keys = tl.zeros([PAD_BEST], tl.int32)
        for rank in tl.static_range(0, BEST):
            key = tl.max(packed, axis=0)
            keys = tl.where(ranks == rank, key, keys)
            packed = tl.where(packed == key, -2147483648, packed)
        values, indices = _unpack(keys)
    else:
        for rank in tl.static_range(0, BEST):
            value, index = tl.max(x, axis=0, return_indices=True)
            values = tl.where(ranks == rank, value, values)
            indices = tl.where(ranks == rank, index, indices)
            x = tl.where(places == index, float("-inf"), x)
    return values, indices


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _noise_of(tokens, first, second):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of tokens, from the two words of a position's key."""
    bits = _mix(tokens * -1640531535 + first)  # 0x9E3779B1
    bits = _mix(bits + second)
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    return -tl.log(-libdevice.log1p(-uniform))


@triton.jit
def _position_key(low, high, position):  # type: ignore[no-untyped-def]
    """64 well-mixed bits of (seed, position), as two words."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    key = seed * 0x9E3779B97F4A7C15 + position.to(tl.uint64) * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    first, second = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    return first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _rank_chunks(  # type: ignore[no-untyped-def]
    logits, scores, ids, mass, names, temperatures, seeds, positions, size, row_stride, num_requests, num_own,
    num_positions, shift,
    BEST: tl.constexpr, PAD_BEST: tl.constexpr, CHUNK: tl.constexpr, IS_NARROW: tl.constexpr, IS_WEIGHED: tl.constexpr,
    HAS_NAMES: tl.constexpr, HAS_NOISE: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, CHUNK)
    columns = chunk * CHUNK + places
    is_column = columns < size
    x = tl.load(logits + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    is_narrow = IS_NARROW
    if HAS_NOISE:
        request = row // num_own
        temperature = tl.load(temperatures + request)
        is_narrow = is_narrow & (temperature == 0)
        if temperature > 0:
            tokens = columns
            if HAS_NAMES:
                tokens = tl.load(names + columns, mask=is_column, other=0).to(tl.int32)
            place = request * num_positions + num_positions - num_own + row % num_own
            first, second = _position_key(
                tl.load(seeds + request), tl.load(seeds + num_requests + request), tl.load(positions + place) + shift
            )
            x = tl.div_rn(x, temperature) + _noise_of(tokens, first, second)
    place = row * tl.num_programs(1) + chunk
    if IS_WEIGHED:
        highest = tl.max(x, axis=0)
        tl.store(mass + place, highest + tl.log(tl.sum(tl.exp(x - highest), axis=0)))
    values, indices = _best_of(x, places, is_narrow, BEST, PAD_BEST)
    ranks = tl.arange(0, PAD_BEST)
    tl.store(scores + place * BEST + ranks, values, mask=ranks < BEST)
    found = tl.minimum(chunk * CHUNK + indices, size - 1)  # not a number has no place
    tl.store(ids + place * BEST + ranks, found, mask=ranks < BEST)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_chunks(  # type: ignore[no-untyped-def]
    scores, ids, mass, names, temperatures, best, best_ids, log_probs, num_chunks, num_own,
    BEST: tl.constexpr, PAD_BEST: tl.constexpr, PAD: tl.constexpr, PAD_CHUNKS: tl.constexpr, IS_NARROW: tl.constexpr,
    IS_WEIGHED: tl.constexpr, HAS_NAMES: tl.constexpr, HAS_NOISE: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    places, chunks, ranks = tl.arange(0, PAD), tl.arange(0, PAD_CHUNKS), tl.arange(0, PAD_BEST)
    num_found = num_chunks * BEST
    x = tl.load(scores + row * num_found + places, mask=places < num_found, other=float("-inf"))
    is_narrow = IS_NARROW
    if HAS_NOISE:
        is_narrow = is_narrow & (tl.load(temperatures + row // num_own) == 0)
    values, indices = _best_of(x, places, is_narrow, BEST, PAD_BEST)
    is_rank = ranks < BEST
    tokens = tl.load(ids + row * num_found + tl.minimum(indices, num_found - 1), mask=is_rank, other=0).to(tl.int64)
    if HAS_NAMES:
        tokens = tl.load(names + tokens, mask=is_rank, other=0).to(tl.int64)
    tl.store(best + row * BEST + ranks, values, mask=is_rank)
    tl.store(best_ids + row * BEST + ranks, tokens, mask=is_rank)
    if IS_WEIGHED:
        masses = tl.load(mass + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
        highest = tl.max(masses, axis=0)
        total = highest + tl.log(tl.sum(tl.exp(masses - highest), axis=0))
        tl.store(log_probs + row * BEST + ranks, values - total, mask=is_rank)


@triton.jit  # type: ignore[untyped-decorator]
def _score_pairs(  # type: ignore[no-untyped-def]
    scores, ids, anchor_ids, projected, before, behind, temperatures, first, later, anchor_stride,
    WIDTH: tl.constexpr, PAD: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, HAS_NOISE: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(IS_OVERLAPPED)
    block, position = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * tl.num_programs(1) + position
    children, dims = tl.arange(0, PAD), tl.arange(0, DEPTH)
    is_child = children < WIDTH
    is_dim = dims < RANK
    child_ids = tl.load(ids + place * WIDTH + children, mask=is_child, other=0)
    if position > 0:
        parent_ids = tl.load(ids + (place - 1) * WIDTH + children, mask=is_child, other=0)
    else:
        parent_ids = tl.load(anchor_ids + block * anchor_stride).to(tl.int64) + tl.zeros([PAD], tl.int64)
    state = tl.load(projected + place * RANK + dims, mask=is_dim, other=0.0)
    if HAS_NOISE:
        temperature = tl.load(temperatures + block)
        if temperature > 0:
            state = tl.div_rn(state.to(tl.float32), temperature).to(projected.dtype.element_ty)
    is_used = is_child[:, None] & is_dim[None, :]
    parents = tl.load(before + parent_ids[:, None] * RANK + dims[None, :], mask=is_used, other=0.0)
    wanted = tl.load(behind + child_ids[:, None] * RANK + dims[None, :], mask=is_used, other=0.0)
    pairs = tl.dot((parents * state[None, :]).to(wanted.dtype), tl.trans(wanted), input_precision="ieee")
    own = tl.load(scores + place * WIDTH + children, mask=is_child, other=0.0)
    pairs = tl.where(is_child[None, :], pairs.to(wanted.dtype).to(tl.float32) + own[None, :], float("-inf"))
    pairs -= tl.max(pairs, axis=1)[:, None]
    pairs -= tl.log(tl.sum(tl.exp(pairs), axis=1))[:, None]
    if position > 0:
        row = (block * (tl.num_programs(1) - 1) + position - 1) * WIDTH + children
        is_pair = is_child[:, None] & is_child[None, :]
        tl.store(later + row[:, None] * WIDTH + children[None, :], pairs, mask=is_pair)
    else:
        is_pair = (children == 0)[:, None] & is_child[None, :]
        tl.store(first + block * WIDTH + (children * 0)[:, None] + children[None, :], pairs, mask=is_pair)


@triton.jit  # type: ignore[untyped-decorator]
def _send(source, place, size, BLOCK: tl.constexpr, IS_OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    wait(IS_OVERLAPPED)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(place + words, tl.load(source + words, mask=words < size), mask=words < size)


def rank_tokens(
    logits: Tensor,
    num_best: int,
    names: Tensor | None = None,
    noise: Noise | None = None,
    *,
    is_weighed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    scores = torch.empty(num_rows, chunks, num_best, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, chunks, num_best, dtype=torch.int32, device=logits.device)
    mass = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    pad = triton.next_power_of_2(chunks * num_best)
    shape: dict[str, Any] = {
        "BEST": num_best,
        "PAD_BEST": triton.next_power_of_2(num_best),
        "IS_NARROW": logits.dtype == torch.bfloat16 and pad <= 65536,
        "IS_WEIGHED": is_weighed,
        "HAS_NAMES": names is not None,
        "HAS_NOISE": noise is not None,
    }
    names = ids if names is None else names
    given = (mass, ids, ids) if noise is None else (noise.temperatures, noise.seeds, noise.positions)
    num_requests = num_rows if noise is None else len(noise.temperatures)
    launch(_rank_chunks, (num_rows, chunks), logits.device,
        logits, scores, ids, mass, names, *given, size, logits.stride(0), num_requests, num_rows // num_requests,
        len(given[2]) // num_requests, 0 if noise is None else noise.shift, CHUNK=CHUNK, num_warps=1, **shape,
    )  # fmt: skip
    best, log_probs = (torch.empty(num_rows, num_best, dtype=torch.float32, device=logits.device) for _ in range(2))
    best_ids = torch.empty(num_rows, num_best, dtype=torch.int64, device=logits.device)
    launch(_merge_chunks, (num_rows,), logits.device,
        scores, ids, mass, names, given[0], best, best_ids, log_probs, chunks, num_rows // num_requests, PAD=pad,
        PAD_CHUNKS=triton.next_power_of_2(chunks), num_warps=1 if pad <= 1024 else 4, **shape,
    )  # fmt: skip
    return best, best_ids, log_probs


def score_pairs(
    scores: Tensor,
    ids: Tensor,
    anchor_ids: Tensor,
    projected: Tensor,
    selector: Selector,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_blocks, depth, width = ids.shape
    rank = selector.before.shape[1]
    first = torch.empty(num_blocks, width, dtype=torch.float32, device=ids.device)
    later = torch.empty(num_blocks, depth - 1, width, width, dtype=torch.float32, device=ids.device)
    launch(_score_pairs, (num_blocks, depth), ids.device,
        scores, ids, anchor_ids, projected, *selector, first if temperatures is None else temperatures, first,
        later, anchor_ids.stride(0), WIDTH=width, PAD=max(MIN_TILE, triton.next_power_of_2(width)), RANK=rank,
        DEPTH=max(MIN_TILE, triton.next_power_of_2(rank)), HAS_NOISE=temperatures is not None, num_warps=4,
    )  # fmt: skip
    return first, later


def send(source: Tensor, place: Tensor) -> None:
    """To or from pinned memory of the host. A copy does the same, but takes 8 microseconds longer to begin."""
    words = source.contiguous().view(torch.int32)
    launch(_send, (triton.cdiv(words.numel(), 1024),), source.device,
        words, place.view(torch.int32), words.numel(), BLOCK=1024, num_warps=4,
    )  # fmt: skip
