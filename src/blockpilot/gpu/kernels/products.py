"""Few tokens times all the weights. float32 products use IEEE arithmetic, not TF32."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from blockpilot.gpu.device import has_large_memory
from blockpilot.gpu.interface import Norm, Parts
from blockpilot.gpu.kernels.launching import MIN_TILE, launch, sum_parts
from blockpilot.gpu.kernels.sublayers import add_norm, gate

MAX_PARTS = 12
MAX_ADDED = 2  # parts that a product of few tokens adds up itself
MAX_NARROW = 1024  # inner size that one warp takes whole
MAX_TILE = 64  # tokens of one program; beyond it the library multiplies, except by small weights
MIN_DEEP, MIN_LONG = 1024, 4096  # inner sizes that are read in longer pieces, and that keep a processor busy alone
MEASURED_FEW = {  # better rows and warps of `multiply_few`, by (a row's HEAD + REST, whether gated, whether normed)
    (1536, False, False): (1, 1),
    (2560, False, True): (2, 2),
    (2560, True, True): (4, 4),
    (10240, False, False): (4, 8),
}
MAX_SMALL, MAX_TOKENS = 1 << 21, 1024  # numbers in a small weight, and tokens that are multiplied by it here


@triton.jit  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    x, weight, out, num_tokens, num_rows, size, chunk,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, HAS_EVEN_ROWS: tl.constexpr,
    HAS_EVEN_DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_EARLY: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.arange(0, ROWS)
    if IS_GATED:  # eight rows of the gate and eight of the up projection by turns: a thread gets both sums of a row
        rows = tl.program_id(0) * (ROWS // 2) + places // 16 * 8 + places % 8
    else:
        rows = tl.program_id(0) * ROWS + places
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    is_token = (tokens < num_tokens)[:, None]
    is_row = (rows < num_rows)[:, None]
    safe_rows = tl.where(rows < num_rows, rows, 0).to(tl.int64)
    if IS_GATED:
        safe_rows += (places // 8 % 2) * num_rows
    first = split * chunk
    last = tl.minimum(first + chunk, size)
    weights = weight + safe_rows[:, None] * size + depth[None, :]
    inputs = x + tokens.to(tl.int64)[:, None] * size + depth[None, :]
    begin = first
    is_depth = (first + depth < last)[None, :]
    if IS_EARLY:  # weights do not depend on the kernel before: the first tile is loaded meanwhile, and used last
        begin += DEPTH
        if HAS_EVEN_DEPTH:
            early = tl.load(weights + first, mask=is_row, other=0.0)
        else:
            early = tl.load(weights + first, mask=is_row & is_depth, other=0.0)
    if IS_OVERLAPPED:
        if AHEAD > 0:
            lines = tl.minimum(begin + tl.arange(0, AHEAD) * 64, size - 1)
            called = (weight + safe_rows[:, None] * size + lines[None, :]).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [called], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    if IS_EARLY:
        if HAS_EVEN_DEPTH:
            early_columns = tl.load(inputs + first, mask=is_token, other=0.0)
        else:
            early_columns = tl.load(inputs + first, mask=is_token & is_depth, other=0.0)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(begin, last, DEPTH):
        if HAS_EVEN_DEPTH:
            if HAS_EVEN_ROWS:  # noqa: SIM108  # a condition of the compiler
                tile = tl.load(weights + at)
            else:
                tile = tl.load(weights + at, mask=is_row, other=0.0)
            columns = tl.load(inputs + at, mask=is_token, other=0.0)
        else:
            is_inner = (at + depth < last)[None, :]
            tile = tl.load(weights + at, mask=is_row & is_inner, other=0.0)
            columns = tl.load(inputs + at, mask=is_token & is_inner, other=0.0)
        sums = tl.dot(tile, tl.trans(columns), sums, input_precision="ieee")
    if IS_EARLY:
        sums = tl.dot(early, tl.trans(early_columns), sums, input_precision="ieee")
    if IS_GATED:
        both = tl.permute(tl.reshape(sums, [ROWS // 16, 2, 8, TOKENS]), 0, 2, 3, 1)
        gates, ups = tl.split(both)
        sums = tl.reshape(gates / (1 + tl.exp(-gates)) * ups, [ROWS // 2, TOKENS])
        rows = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    targets = (split * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
    is_target = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + targets, sums.to(out.dtype.element_ty), mask=is_target)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_few(  # type: ignore[no-untyped-def]
    x, delta, norm, weight, total, normed, out, num_rows, size, part_stride, eps,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, KEEPS_NORMED: tl.constexpr, IS_GATED: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Whole rows of weights, `HEAD` numbers and a rest, all loaded before the input is there; then token by token."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    head, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, REST)
    is_rest = rest < size
    is_both = is_row & is_rest[None, :]
    starts = weight + rows.to(tl.int64)[:, None] * size
    uppers = starts + num_rows.to(tl.int64) * size
    head_tile = tl.load(starts + head[None, :], mask=is_row, other=0.0)
    rest_tile = tl.load(starts + rest[None, :], mask=is_both, other=0.0)
    upper_head = tl.load(uppers + head[None, :], mask=is_row, other=0.0) if IS_GATED else head_tile
    upper_rest = tl.load(uppers + rest[None, :], mask=is_both, other=0.0) if IS_GATED else rest_tile
    if HAS_NORM:
        head_norm = tl.load(norm + head).to(tl.float32)
        rest_norm = tl.load(norm + rest, mask=is_rest, other=0.0).to(tl.float32)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(0, TOKENS):
        start = token * size
        left = tl.load(x + start + head).to(tl.float32)
        right = tl.load(x + start + rest, mask=is_rest, other=0.0).to(tl.float32)
        if HAS_NORM:
            if PARTS > 0:
                left += sum_parts(delta, start + head, part_stride, head < size, PARTS)
                right += sum_parts(delta, start + rest, part_stride, is_rest, PARTS)
                left = left.to(x.dtype.element_ty).to(tl.float32)
                right = right.to(x.dtype.element_ty).to(tl.float32)
                if tl.program_id(0) == 0:
                    tl.store(total + start + head, left.to(total.dtype.element_ty))
                    tl.store(total + start + rest, right.to(total.dtype.element_ty), mask=is_rest)
            scale = tl.rsqrt((tl.sum(left * left, axis=0) + tl.sum(right * right, axis=0)) / size + eps)
            left = (left * scale * head_norm).to(x.dtype.element_ty).to(tl.float32)
            right = (right * scale * rest_norm).to(x.dtype.element_ty).to(tl.float32)
            if KEEPS_NORMED:  # noqa: SIM102  # a condition of the compiler
                if tl.program_id(0) == 0:
                    tl.store(normed + start + head, left.to(normed.dtype.element_ty))
                    tl.store(normed + start + rest, right.to(normed.dtype.element_ty), mask=is_rest)
        sums = tl.sum(head_tile.to(tl.float32) * left[None, :], axis=1)
        sums += tl.sum(rest_tile.to(tl.float32) * right[None, :], axis=1)
        if IS_GATED:
            ups = tl.sum(upper_head.to(tl.float32) * left[None, :], axis=1)
            ups += tl.sum(upper_rest.to(tl.float32) * right[None, :], axis=1)
            sums = sums / (1 + tl.exp(-sums)) * ups
        tl.store(out + token * num_rows + rows, sums.to(out.dtype.element_ty), mask=rows < num_rows)


@dataclass(frozen=True)
class LinearPlan:
    tokens: int
    rows: int
    depth: int
    num_splits: int = 1
    is_early: bool = True  # the first tile of weights is loaded before the input is there
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 2  # cache lines of each row, behind the first tile, that are called for before the input is there


def plan_linear(
    num_tokens: int, num_rows: int, size: int, num_processors: int, *, has_memory: bool = False
) -> LinearPlan:
    """Tiles measured on an H200: about two programs for every processor; few rows are split over the inner size."""
    if has_memory and size >= MIN_DEEP and num_rows * size > MAX_SMALL and num_tokens <= MAX_TILE:
        return _plan_large(num_tokens, num_rows, size, num_processors)
    programs = -(-num_rows // 64)
    depth = 128 if size >= MIN_DEEP else 64
    most = min(size // (2 * depth), MAX_PARTS)
    if num_tokens <= MIN_TILE:
        wanted = 1 if programs > 0.7 * num_processors else round(2 * num_processors / programs)
        is_long = size >= MIN_DEEP or num_rows > size
        if num_tokens > MIN_TILE // 2 and is_long and size < 2 * MIN_DEEP and 3 * programs <= num_processors:
            return LinearPlan(MIN_TILE, 64, 128, max(1, min(most, 3)))  # long pieces, and few parts to add up
        return LinearPlan(MIN_TILE, 64, depth, max(1, min(wanted, most)))
    share = 1.5 if num_tokens <= MAX_TILE else 1.0
    splits = max(1, min(round(share * num_processors / (programs * -(-num_tokens // MAX_TILE))), most))
    tokens, is_early = _tile(num_tokens, programs * splits, num_processors)
    if splits == 1:
        return LinearPlan(tokens, 64, 64, is_early=is_early)
    return LinearPlan(tokens, 64, depth, splits, is_early=is_early, num_stages=4 if tokens < MAX_TILE else 3)


def _plan_large(num_tokens: int, num_rows: int, size: int, num_processors: int) -> LinearPlan:
    """Up to 64 tokens times the weights of models of billions. Where a program has a processor for itself, it takes
    four or six tiles ahead; where programs come in waves, what is loaded early would only be in the way."""
    programs, depth = -(-num_rows // 64), 128
    most = min(size // (2 * depth), MAX_PARTS)
    tokens = _fitting_tile(num_tokens)
    if programs > num_processors:
        return LinearPlan(tokens, 64, depth, is_early=False, num_stages=4 if tokens < MAX_TILE else 3)
    if tokens == MIN_TILE:
        is_alone = size >= MIN_LONG or programs > 0.7 * num_processors
        wanted = num_processors // programs if is_alone else round(2 * num_processors / programs)
        return LinearPlan(tokens, 64, depth, max(1, min(wanted, most)), num_stages=6 if is_alone else 4)
    if tokens < MAX_TILE:
        wanted = round(1.8 * num_processors / programs)
        return LinearPlan(tokens, 64, depth, max(1, min(wanted, most)), num_stages=3)
    splits = max(1, min(num_processors // programs, most))
    return LinearPlan(tokens, 64, depth, splits, is_early=False, num_stages=6 if splits == 1 else 4)


def plan_gated(
    num_tokens: int, num_rows: int, size: int, num_processors: int, *, has_memory: bool = False
) -> LinearPlan:
    """Half of a program's rows are of the gate, half of the up projection."""
    if size >= MIN_DEEP and num_tokens <= MAX_TILE:
        tokens = _fitting_tile(num_tokens)
        if tokens == MAX_TILE:
            return LinearPlan(tokens, 64, 64, is_early=False, num_stages=4, ahead=1)
        return LinearPlan(tokens, 64, 128, is_early=False, num_stages=3)
    stages = 6 if has_memory else 4  # small models wait for memory more than they read it
    if 2 * MIN_TILE < num_tokens <= 3 * MIN_TILE:
        return LinearPlan(2 * MIN_TILE, 64, 64, num_stages=6)
    if 3 * MIN_TILE < num_tokens <= MAX_TILE:
        return LinearPlan(MAX_TILE, 128, 64, num_stages=stages)
    tokens, is_early = _tile(num_tokens, -(-num_rows // 64), num_processors)
    is_small = size < MIN_DEEP and tokens < MAX_TILE
    return LinearPlan(tokens, 128, 64, is_early=is_early, num_stages=stages if is_small else 4)


def _fitting_tile(num_tokens: int) -> int:
    return next(tile for tile in (MIN_TILE, 2 * MIN_TILE, MAX_TILE) if num_tokens <= tile)


def _tile(num_tokens: int, programs: int, num_processors: int) -> tuple[int, bool]:
    """Tokens of a tile, and whether weights are loaded early. The smallest tile with a processor for every program is
    best: weights that are read again come from the cache. Where there is none, shared memory is short for loading
    early, and reading weights once is best."""
    if num_tokens <= MIN_TILE:
        return MIN_TILE, True
    for tokens in (MIN_TILE, 2 * MIN_TILE, MAX_TILE):
        if programs * -(-num_tokens // tokens) <= num_processors:
            return tokens, True
    return MAX_TILE, False


def is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is made here; the library's is better for many tokens of large weights, and in float32."""
    most = MAX_TOKENS if weight.numel() <= MAX_SMALL else MAX_TILE
    return len(x) <= most and x.dtype != torch.float32


def are_few(x: Tensor, weight: Tensor) -> bool:
    """Whether tokens are not worth a tile of the matrix units: one, or two of a small model."""
    return len(x) <= (2 if x.shape[1] <= MAX_NARROW else 1) and is_ours(x, weight)


def can_norm(x: Tensor, delta: Parts | None, weight: Tensor) -> bool:
    """Whether the product adds and norms by itself. Every program does, so there must not be much to add up: the
    routed experts of several tokens leave a part each."""
    return are_few(x, weight) and (delta is None or delta.num_parts <= MAX_ADDED)


def linear(
    x: Tensor, weight: Tensor, num_processors: int, plan: LinearPlan | None = None, *, out: Tensor | None = None
) -> Parts:
    """x [N, size] times weight [rows, size]; with `out` the sum is there and not in parts."""
    if not is_ours(x, weight):
        return Parts(F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out))
    num_tokens, size = x.shape
    num_rows = len(weight)
    if plan is None and are_few(x, weight):
        out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x.device) if out is None else out
        multiply_few(x, weight, out)
        return Parts(out)
    has_memory = has_large_memory(x.device)
    plan = plan or plan_linear(num_tokens, num_rows, size, num_processors, has_memory=has_memory)
    splits = plan.num_splits if out is None else 1
    chunk = triton.cdiv(triton.cdiv(size, splits), plan.depth) * plan.depth
    splits = triton.cdiv(size, chunk)
    if out is None:
        shape = (splits, num_tokens, num_rows) if splits > 1 else (num_tokens, num_rows)
        out = torch.empty(shape, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device)
    _multiply(x, weight, out, plan, chunk, is_gated=False)
    return Parts(out, splits)


def gated_linear(x: Tensor, weight: Tensor, num_processors: int, plan: LinearPlan | None = None) -> Tensor:
    """silu(gate) * up of x [N, size] and the stacked rows [2 * rows, size] of the two projections."""
    if not is_ours(x, weight):
        return gate(Parts(F.linear(x, weight)), x.dtype)
    num_tokens, size = x.shape
    num_rows = len(weight) // 2
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    if plan is None and are_few(x, weight):
        multiply_few(x, weight, out)
        return out
    plan = plan or plan_gated(num_tokens, num_rows, size, num_processors, has_memory=has_large_memory(x.device))
    _multiply(x, weight, out, plan, size, is_gated=True)
    return out


def norm_linear(
    x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor, num_processors: int
) -> tuple[Tensor, Parts]:
    if not can_norm(x, delta, weight):
        total, normed = add_norm(x, delta, norm)
        return total, linear(normed, weight, num_processors)
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    return multiply_few(x, weight, out, delta, norm), Parts(out)


def norm_gated_linear(
    x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor, num_processors: int
) -> tuple[Tensor, Tensor]:
    if not can_norm(x, delta, weight):
        total, normed = add_norm(x, delta, norm)
        return total, gated_linear(normed, weight, num_processors)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    return multiply_few(x, weight, out, delta, norm), out


def multiply_few(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    delta: Parts | None = None,
    norm: Norm | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """Few tokens into `out`; gated where it has half the rows of the weight. What the norm is of comes back, and where
    `normed` is given, it gets what the product is of."""
    size, num_rows = x.shape[1], out.shape[1]
    total = x if delta is None else torch.empty_like(x)
    is_gated = num_rows < len(weight)
    rows, warps = plan_few(size, is_gated=is_gated, has_norm=norm is not None)
    launch(_multiply_few, (triton.cdiv(num_rows, rows),), x.device,
        x, x if delta is None else delta.values, x if norm is None else norm.weight, weight, total,
        total if normed is None else normed, out, num_rows, size,
        0 if delta is None else delta.stride, 0.0 if norm is None else norm.eps, TOKENS=len(x), ROWS=rows,
        **head_and_rest(size), PARTS=0 if delta is None else delta.num_parts,
        HAS_NORM=norm is not None, KEEPS_NORMED=normed is not None, IS_GATED=is_gated, num_warps=warps,
    )  # fmt: skip
    return total


def head_and_rest(size: int) -> dict[str, int]:
    """A row of any length as two powers of two."""
    head = max(1, triton.next_power_of_2(size) // 2)
    return {"HEAD": head, "REST": triton.next_power_of_2(max(1, size - head))}


def plan_few(size: int, *, is_gated: bool, has_norm: bool) -> tuple[int, int]:
    """Rows of a program, and its warps. Small models have too few rows to fill the device with large programs."""
    if size <= MAX_NARROW:
        return 4, 1
    most = 8192 if is_gated else 16384  # numbers of one row that the registers of four warps hold
    usual = max(1, min(8, most // triton.next_power_of_2(size))), 4 if size <= most else 8
    return MEASURED_FEW.get((sum(head_and_rest(size).values()), is_gated, has_norm), usual)


def _multiply(x: Tensor, weight: Tensor, out: Tensor, plan: LinearPlan, chunk: int, *, is_gated: bool) -> None:
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    height = plan.rows // 2 if is_gated else plan.rows
    grid = (triton.cdiv(num_rows, height), triton.cdiv(num_tokens, plan.tokens), triton.cdiv(size, chunk))
    launch(_linear, grid, x.device,
        x, weight, out, num_tokens, num_rows, size, chunk, TOKENS=plan.tokens, ROWS=plan.rows, DEPTH=plan.depth,
        AHEAD=plan.ahead, HAS_EVEN_ROWS=num_rows % height == 0, HAS_EVEN_DEPTH=size % plan.depth == 0,
        IS_GATED=is_gated, IS_EARLY=plan.is_early, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
