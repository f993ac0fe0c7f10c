"""Parts of attention, and how they become one: the same folds in every kernel that has them.

`attention.py` says what chunks and groups are. Keys behind a query add exact zeros. Masses are sums of integers
(`fixed_point.py` says why).
"""

import triton
import triton.language as tl

from blockpilot.gpu import schedule
from blockpilot.gpu.kernels.fixed_point import round_to_integer
from blockpilot.gpu.kernels.launching import per_count

CHUNK, GROUP_CHUNKS = tl.constexpr(schedule.CHUNK), tl.constexpr(schedule.GROUP_CHUNKS)
NEVER = tl.constexpr(-1.0e30)
MASS_UNIT = tl.constexpr(4194304.0)  # 2**22: 64 weights of at most 1 stay below 2**31


@triton.jit
def _count_bits(words):  # type: ignore[no-untyped-def]
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit  # type: ignore[untyped-decorator]
def count_seen(masks, tokens, is_there, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of its request's new rows each token sees: with no masks, those up to itself."""
    if WORDS == 0:
        return tokens % count + 1
    seen = tokens * 0
    for word in tl.static_range(WORDS):
        seen += _count_bits(tl.load(masks + tokens * WORDS + word, mask=is_there, other=0))
    return seen


@triton.jit
def read_chunk(queries, key_tile, value_tile, is_seen, scale):  # type: ignore[no-untyped-def]
    """Highest score, mass and mixed values of one chunk."""
    scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    best = tl.maximum(tl.max(scores, axis=1), NEVER)
    weights = tl.exp(scores - best[:, None])
    mass = tl.sum(round_to_integer(weights * MASS_UNIT), axis=1).to(tl.float32) / MASS_UNIT
    return best, mass, tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")


@triton.jit
def fold(best, mass, mixed, later_best, later_mass, later_mixed):  # type: ignore[no-untyped-def]
    """Two parts as one, the earlier first. A part that saw nothing leaves the other as it is."""
    higher = tl.maximum(best, later_best)
    left, right = tl.exp(best - higher), tl.exp(later_best - higher)
    mass = mass * left + later_mass * right
    return higher, mass, mixed * left[:, None] + later_mixed * right[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def nothing(ROWS: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.full([ROWS], NEVER, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, PAD], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def store_part(  # type: ignore[no-untyped-def]
    partial, stats, shift, places, rows, best, mass, mixed, is_row, is_place, DIM: tl.constexpr
):  # fmt: skip
    """A part of all rows, `shift` rows behind the first part."""
    tl.store(partial + shift.to(tl.int64) * DIM + places, mixed, mask=is_place)
    tl.store(stats + 2 * (shift + rows), best, mask=is_row)
    tl.store(stats + 2 * (shift + rows) + 1, mass, mask=is_row)


@triton.jit
def store_result(out, places, mass, mixed, is_place):  # type: ignore[no-untyped-def]
    result = mixed / tl.maximum(mass, 1e-30)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_place)


@triton.jit  # type: ignore[untyped-decorator]
def load_part(  # type: ignore[no-untyped-def]
    partial, stats, shift, places, rows, is_there, is_place, DIM: tl.constexpr
):  # fmt: skip
    best = tl.load(stats + 2 * (shift + rows), mask=is_there, other=NEVER)
    mass = tl.load(stats + 2 * (shift + rows) + 1, mask=is_there, other=0.0)
    return (
        best,
        mass,
        tl.load(partial + shift.to(tl.int64) * DIM + places, mask=is_place & is_there[:, None], other=0.0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def load_group(  # type: ignore[no-untyped-def]
    partial, stats, group, num_chunks, num_rows, places, rows, is_row, is_place,
    TILE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A group as one part, of its first chunks up to `num_chunks`."""
    best, mass, mixed = nothing(TILE, PAD)
    each: tl.constexpr = GROUP_CHUNKS // UNIT
    for part in tl.static_range(each):
        split = group * each + part
        is_there = is_row & (split * UNIT < num_chunks)
        later = load_part(partial, stats, split * num_rows, places, rows, is_there, is_place, DIM)
        if each == 1:
            best, mass, mixed = later[0], later[1], later[2]
        else:
            best, mass, mixed = fold(best, mass, mixed, later[0], later[1], later[2])
    return best, mass, mixed


@per_count  # type: ignore[untyped-decorator]
def combine_parts(  # type: ignore[no-untyped-def]
    partial, stats, starts, masks, branches, closed, closed_stats, out, num_rows, capacity, count,
    ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, CAN_BRANCH: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Folds the parts of rows. Those of a branching tree leave two: closed groups, and the group that goes on."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PAD)
    is_row, is_dim = rows < num_rows, dims < DIM
    tokens = tl.where(is_row, rows // HEADS, 0)
    start = tl.load(starts + tokens // count)
    num_chunks = tl.cdiv(tl.minimum(start + count_seen(masks, tokens, is_row, count, WORDS), capacity), CHUNK)
    num_closed = tl.cdiv(num_chunks, GROUP_CHUNKS)
    is_branching = rows < 0
    if CAN_BRANCH:
        is_branching = is_row & (tl.load(branches + tokens // count) != 0)
        num_chunks = tl.where(is_branching, start // CHUNK, num_chunks)
        num_closed = tl.where(is_branching, num_chunks // GROUP_CHUNKS, num_closed)
    places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    is_place = is_row[:, None] & is_dim[None, :]
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    best, mass, mixed = nothing(ROWS, PAD)
    for block in range(0, tl.max(tl.where(is_row, num_closed, 0), axis=0), BLOCK):
        for place in tl.static_range(BLOCK):
            limit = tl.where(block + place < num_closed, num_chunks, 0)
            part = load_group(
                partial, stats, block + place, limit, num_rows, places, rows, is_row, is_place, ROWS, DIM, PAD, UNIT
            )
            best, mass, mixed = fold(best, mass, mixed, part[0], part[1], part[2])
    is_whole = is_place
    if CAN_BRANCH:
        part = load_group(
            partial, stats, num_closed, num_chunks, num_rows, places, rows, is_branching, is_place, ROWS, DIM, PAD, UNIT
        )
        is_both = is_place & is_branching[:, None]
        store_part(closed, closed_stats, num_rows * 0, places, rows, best, mass, mixed, is_branching, is_both, DIM)
        store_part(closed, closed_stats, num_rows, places, rows, part[0], part[1], part[2], is_branching, is_both, DIM)
        is_whole = is_place & (is_branching == 0)[:, None]
    store_result(out, places, mass, mixed, is_whole)


@triton.jit  # type: ignore[untyped-decorator]
def find_rows(  # type: ignore[no-untyped-def]
    masks, starts, branches, rows, count, WORDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Cache rows of a node's keys, in the order of positions, from the anchor's chunk on: bit b of its mask is an
    ancestor, and the place of that bit among those that are set is the ancestor's depth."""
    token = tl.program_id(0)
    if tl.load(branches + token // count) != 0:
        bits: tl.constexpr = triton.next_power_of_2(WORDS * 32)
        numbers, columns = tl.arange(0, bits), tl.arange(0, CHUNK)
        words = tl.load(masks + token * WORDS + numbers // 32, mask=numbers < WORDS * 32, other=0)
        is_ancestor = (words >> (numbers % 32)) & 1
        depths = tl.where(is_ancestor == 1, tl.cumsum(is_ancestor, axis=0) - 1, -1)
        start = tl.load(starts + token // count)
        for tail in range(WIDTH // CHUNK):
            positions = (start // CHUNK + tail) * CHUNK + columns
            is_here = depths[None, :] == (positions - start)[:, None]
            found = start + tl.sum(tl.where(is_here, numbers[None, :], 0), axis=1)
            tl.store(rows + token * WIDTH + tail * CHUNK + columns, tl.where(positions < start, positions, found))


@triton.jit  # type: ignore[untyped-decorator]
def _collapse(part, HEIGHT: tl.constexpr, TIMES: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part whose rows stand `TIMES` times each, once."""
    best = tl.max(tl.reshape(part[0], [HEIGHT, TIMES]), axis=1)
    mass = tl.max(tl.reshape(part[1], [HEIGHT, TIMES]), axis=1)
    return best, mass, tl.max(tl.reshape(part[2], [HEIGHT, TIMES, PAD]), axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(keys, values, found, base, is_key, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk of keys and values from the rows that `found` names."""
    columns, dims = tl.arange(0, CHUNK), tl.arange(0, PAD)
    rows = tl.load(found + columns, mask=is_key, other=0).to(tl.int64)
    offsets, is_there = base + rows[:, None] * DIM + dims[None, :], is_key[:, None] & (dims < DIM)[None, :]
    return tl.load(keys + offsets, mask=is_there, other=0.0), tl.load(values + offsets, mask=is_there, other=0.0)


@per_count  # type: ignore[untyped-decorator]
def finish_nodes(  # type: ignore[no-untyped-def]
    q, keys, values, slots, starts, masks, branches, tail_rows, partial, stats, out, scale, slot_stride, capacity,
    num_rows, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, HEIGHT: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One token and the heads that share keys: its parts, and for a node of a branching tree the chunks of its own.
    If `IS_EARLY`, what earlier passes stored of the first is loaded while the kernel before ends."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1)
    request = token // count
    start, is_branching = tl.load(starts + request), tl.load(branches + request) != 0
    end = tl.minimum(start + count_seen(masks, token, True, count, WORDS), capacity)
    anchor = start // CHUNK  # the first chunk that is gathered
    base = tl.load(slots + request).to(tl.int64) * slot_stride + head.to(tl.int64) * capacity * DIM
    columns, dims = tl.arange(0, CHUNK), tl.arange(0, PAD)
    is_dim = (dims < DIM)[None, :]
    if IS_EARLY:
        is_key = (anchor * CHUNK + columns < end) & is_branching
        found = tl.load(tail_rows + token * WIDTH + columns, mask=is_key, other=0)
        offsets = base + found.to(tl.int64)[:, None] * DIM + dims[None, :]
        is_old = (is_key & (found < start))[:, None] & is_dim
        key_tile = tl.load(keys + offsets, mask=is_old, other=0.0)
        value_tile = tl.load(values + offsets, mask=is_old, other=0.0)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if is_branching | (UNIT > 0):
        times: tl.constexpr = TILE // HEIGHT
        askers = tl.arange(0, TILE) // times
        is_asker = (askers < GROUP)[:, None]
        first = token.to(tl.int64) * HEADS + head * GROUP
        queries = tl.load(q + (first + askers)[:, None] * DIM + dims[None, :], mask=is_asker & is_dim, other=0.0)
        if IS_EARLY:
            is_new = (is_key & (found >= start))[:, None] & is_dim
            key_tile = tl.where(is_new, tl.load(keys + offsets, mask=is_new, other=0.0), key_tile)
            value_tile = tl.where(is_new, tl.load(values + offsets, mask=is_new, other=0.0), value_tile)
        members = tl.arange(0, HEIGHT)
        is_row, rows = members < GROUP, token * HEADS + head * GROUP + members
        places, is_place = rows.to(tl.int64)[:, None] * DIM + dims[None, :], is_row[:, None] & is_dim
        num_shared, num_closed = tl.cdiv(end, CHUNK), tl.cdiv(end, CHUNK * GROUP_CHUNKS)
        if is_branching:
            num_shared, num_closed = anchor, anchor // GROUP_CHUNKS
        best, mass, mixed = nothing(HEIGHT, PAD)
        open_best, open_mass, open_mixed = nothing(HEIGHT, PAD)  # of the group that goes on
        if UNIT > 0:
            for block in range(0, num_closed, BLOCK):
                for place in tl.static_range(BLOCK):
                    limit = tl.where(block + place < num_closed, num_shared, 0)
                    part = load_group(
                        partial, stats, block + place, limit, num_rows, places, rows, is_row, is_place, HEIGHT, DIM,
                        PAD, UNIT,
                    )  # fmt: skip
                    best, mass, mixed = fold(best, mass, mixed, part[0], part[1], part[2])
            open_best, open_mass, open_mixed = load_group(
                partial, stats, num_closed, num_shared, num_rows, places, rows, is_row & is_branching, is_place,
                HEIGHT, DIM, PAD, UNIT,
            )  # fmt: skip
        else:
            has_closed, has_open = is_row & (num_closed > 0), is_row & (anchor % GROUP_CHUNKS > 0)
            best, mass, mixed = load_part(partial, stats, num_rows * 0, places, rows, has_closed, is_place, DIM)
            open_best, open_mass, open_mixed = load_part(
                partial, stats, num_rows, places, rows, has_open, is_place, DIM
            )
        if is_branching:
            for chunk in range(anchor, tl.cdiv(end, CHUNK)):
                if IS_EARLY:
                    if chunk > anchor:
                        is_key = chunk * CHUNK + columns < end
                        key_tile, value_tile = _gather(
                            keys, values, tail_rows + token * WIDTH + (chunk - anchor) * CHUNK, base, is_key, DIM, PAD
                        )
                else:
                    is_key = chunk * CHUNK + columns < end
                    key_tile, value_tile = _gather(
                        keys, values, tail_rows + token * WIDTH + (chunk - anchor) * CHUNK, base, is_key, DIM, PAD
                    )
                if chunk // GROUP_CHUNKS * GROUP_CHUNKS == chunk:
                    best, mass, mixed = fold(best, mass, mixed, open_best, open_mass, open_mixed)
                    open_best, open_mass, open_mixed = nothing(HEIGHT, PAD)
                later = read_chunk(queries, key_tile, value_tile, is_asker & is_key[None, :], scale)
                if times > 1:
                    later = _collapse(later, HEIGHT, times, PAD)
                open_best, open_mass, open_mixed = fold(open_best, open_mass, open_mixed, later[0], later[1], later[2])
        best, mass, mixed = fold(best, mass, mixed, open_best, open_mass, open_mixed)
        store_result(out, places, mass, mixed, is_place)
