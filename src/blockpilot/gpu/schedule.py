"""What belongs to a weight or a position, and what may follow the shape of a pass.

A token's logits are the same bits in every pass because the order in which numbers are added belongs to the weight
(`num_splits`) and to absolute positions (`CHUNK`, `GROUP_CHUNKS`). Everything in a `*Plan` is free: tiles, warps and
programs change how fast a pass is, and no bit of it. docs/exactness.md has the whole list.

Plans were chosen on an H200.
"""

from dataclasses import dataclass, replace

import torch

MIN_TILE = 16  # the smallest tile the matrix units take

SPLIT_UNIT = 128  # parts begin at multiples of it
MIN_PART = 512  # inner size that is worth a part of its own
TILE_ROWS = 64
FULL_GRID = 132  # tiles of 64 rows, parts counted, that a weight shall have: one for each processor of a large GPU

CHUNK = 64  # keys, from a multiple of it on, that make one part of attention
GROUP_CHUNKS = 4  # chunks that are folded in order before groups are

MAX_FEW = 64  # tokens of products that wait for memory; beyond them tiles are those of large products
MAX_SMALL, MAX_SMALL_TOKENS = 1 << 21, 256  # numbers of a small weight, and tokens up to which its tiles are small
LARGE_MEMORY, SMALL_MEMORY = 226 << 10, 98 << 10  # bytes that the tiles of a program may take
MAX_WHOLE_ROW = 1024  # inner size of a part up to which a program holds whole rows for one token
MAX_GATED_ROW = 640  # up to which they are 64 rows of gates and ups, not 32
MAX_QUERIES = 64  # of one program
MIN_BRANCHING = 3  # tokens of a tree that is no chain
MAX_PART_BYTES = 1 << 30  # that programs may leave of attention: beyond, every program reads a whole context
SHORT = 2048  # contexts that are read chunk by chunk where requests are few


def num_splits(num_rows: int, size: int) -> int:
    """Into how many parts the inner size of a weight [rows, size] is cut: a function of the weight alone."""
    if num_rows > size:
        return 1
    wanted = min(FULL_GRID // -(-num_rows // TILE_ROWS), size // MIN_PART)
    return -(-size // part_size(size, wanted)) if wanted > 1 else 1


def part_size(size: int, splits: int) -> int:
    """Inner size of one part; the last may be shorter."""
    return -(-size // (splits * SPLIT_UNIT)) * SPLIT_UNIT if splits > 1 else size


def product_dtype(splits: int, dtype: torch.dtype) -> torch.dtype:
    """What a product is stored as: parts stay float32 until they are added."""
    return torch.float32 if splits > 1 else dtype


def next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class FewPlan:
    """A tile that is tall of weights."""

    tokens: int
    rows: int
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 2  # cache lines of each row that are called for before the input is there


@dataclass(frozen=True)
class ManyPlan:
    """A tile that is tall of tokens."""

    tokens: int
    rows: int
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8  # tiles of rows that run together


@dataclass(frozen=True)
class TiledPlan(ManyPlan):
    """The same, brought by the copy engine. A gated product has `rows` of the gate and as many of the up projection."""


LinearPlan = FewPlan | ManyPlan


def plan_linear(
    num_tokens: int,
    num_rows: int,
    size: int,
    dtype: torch.dtype,
    *,
    splits: int = 1,
    is_gated: bool = False,
    is_added: bool = False,
    can_tile: bool = True,
    memory: int = LARGE_MEMORY,
) -> LinearPlan:
    """`num_rows` are those of the result, `splits` its parts."""
    tokens = max(MIN_TILE, next_power(num_tokens))
    if dtype == torch.float32:
        return FewPlan(min(tokens, 32), 32, 32, num_stages=3) if num_tokens <= MAX_FEW else ManyPlan(64, 64, 16, 4)
    is_small = num_rows * size * (1 + is_gated) <= MAX_SMALL
    plan: LinearPlan
    if is_small and num_tokens <= MAX_SMALL_TOKENS:
        plan = _plan_small(num_tokens, num_rows, size, splits=splits, is_gated=is_gated)
    elif num_tokens <= MAX_FEW:
        plan = _plan_few(tokens, num_rows, size, splits=splits, is_gated=is_gated, can_tile=can_tile)
    elif not can_tile:
        plan = ManyPlan(128, 128)
    elif is_gated:
        plan = TiledPlan(128, 128, 64, 8, 4) if num_tokens <= 128 else TiledPlan(128, 64, 64, 4, 5)
    elif is_added:
        plan = TiledPlan(128, 128, 64, 8, 5)
    else:
        plan = _plan_tiled(num_tokens, num_rows, splits)
    return _fit(plan, memory, is_gated=is_gated)


def _plan_small(num_tokens: int, num_rows: int, size: int, *, splits: int, is_gated: bool) -> FewPlan:
    """The smallest tile with a processor for every program: weights that are read again come from the cache."""
    row_tiles = -(-num_rows // (TILE_ROWS // 2 if is_gated else TILE_ROWS)) * splits
    fitting = [tile for tile in (16, 32, 64) if row_tiles * -(-num_tokens // tile) <= FULL_GRID]
    if not fitting:
        return FewPlan(64, 128, 64, num_stages=5)
    return FewPlan(fitting[0], TILE_ROWS, 128 if is_gated or size % 128 == 0 else 64, num_stages=6)


def _plan_few(tokens: int, num_rows: int, size: int, *, splits: int, is_gated: bool, can_tile: bool) -> LinearPlan:
    """Up to `MAX_FEW` tokens times a large weight: what counts is how fast it is read."""
    if size < 1024 and tokens < MAX_FEW:  # many short rows
        return FewPlan(tokens, 128, 64, num_stages=4 if tokens == MIN_TILE else 3)
    if tokens == MAX_FEW and can_tile and num_rows > 128 * FULL_GRID:
        return TiledPlan(tokens, 128, 64, 4, 3)
    if is_gated:
        return FewPlan(tokens, 128 if tokens == MAX_FEW else 64, 64, num_stages=4)
    is_alone = -(-num_rows // TILE_ROWS) * splits <= FULL_GRID  # a processor for every program, and its memory
    return FewPlan(tokens, 64, 128, num_stages=6 if is_alone and tokens < MAX_FEW else 4)


def _plan_tiled(num_tokens: int, num_rows: int, splits: int) -> TiledPlan:
    token_tiles = -(-num_tokens // 128)
    if token_tiles * -(-num_rows // 128) * splits < 96 or num_rows <= 1024:
        return TiledPlan(128, 64, 64, 4, 5)
    programs = token_tiles * -(-num_rows // 128) * splits
    if num_tokens >= 1024:
        return TiledPlan(256, 128, 64, 8, 4)
    if splits > 1 and programs > FULL_GRID:
        return TiledPlan(128, 256, 64, 8, 4)
    return TiledPlan(128, 128, 64, 4, 5 if programs <= FULL_GRID else 3)


def _fit(plan: LinearPlan, memory: int, *, is_gated: bool) -> LinearPlan:
    """With as many stages as the memory of a processor holds."""
    rows = plan.rows * 2 if is_gated and isinstance(plan, TiledPlan) else plan.rows
    most = memory // ((plan.tokens + rows) * plan.depth * 2)
    return plan if plan.num_stages <= most else replace(plan, num_stages=max(1, most))


def holds_rows(num_tokens: int, num_rows: int, size: int, dtype: torch.dtype, splits: int = 1) -> bool:
    """Whether programs hold whole rows of a part, for one token of a small model. `num_rows` are all of the weight."""
    is_small = part_size(size, splits) <= MAX_WHOLE_ROW and num_rows * size <= MAX_SMALL
    return num_tokens == 1 and is_small and dtype != torch.float32


def adds_parts(num_tokens: int, num_rows: int) -> bool:
    """Whether one program makes all parts and adds them, in the same order: there are enough programs without."""
    return num_tokens > MAX_FEW and -(-num_tokens // 128) * -(-num_rows // 128) >= FULL_GRID


def num_tails(count: int) -> int:
    """Chunks that a branching tree of so many tokens may reach, its anchor's counted."""
    return -(-(CHUNK - 1 + count) // CHUNK)


def part_bytes(num_rows: int, dim: int) -> int:
    """What one part of attention takes: mixed values, the highest score and the mass of every query head."""
    return num_rows * (dim + 2) * 4


@dataclass(frozen=True)
class AttentionPlan:
    tile: int  # queries of one program
    unit: int  # chunks of one program: 1, those of a group, or 0 for all
    num_warps: int = 4
    num_stages: int = 2


def plan_attention(
    num_requests: int,
    num_kv_heads: int,
    num_queries: int,
    row_bytes: int,
    *,
    context: int,
    is_prompt: bool,
    can_branch: bool,
    processors: int,
    memory: int = LARGE_MEMORY,
) -> AttentionPlan:
    """`row_bytes` are those of a padded head. Chunks are shared out where there are too few programs without."""
    tile = min(MAX_QUERIES, max(MIN_TILE, next_power(num_queries)))
    while tile > MIN_TILE and (tile + 2 * CHUNK) * row_bytes > memory:
        tile //= 2
    programs = num_requests * num_kv_heads * -(-num_queries // tile)
    is_narrow = tile == MIN_TILE and row_bytes <= 128
    if is_prompt:
        plan = AttentionPlan(tile, 0, 4, 2)
    elif context > SHORT:
        unit = GROUP_CHUNKS if programs < 4 * processors else 0
        plan = AttentionPlan(tile, unit, 2 if tile == MIN_TILE else 4, 2)
    elif programs >= 0.9 * processors and not is_narrow:
        plan = AttentionPlan(tile, 0, 4, 4 if programs <= processors and not can_branch else 3)
    else:
        plan = AttentionPlan(MIN_TILE if num_requests == 1 and num_queries <= MAX_QUERIES else tile, 1, 4, 1)
    most = (memory - plan.tile * row_bytes) // (2 * CHUNK * row_bytes)
    return plan if plan.num_stages <= most else replace(plan, num_stages=max(1, most))
