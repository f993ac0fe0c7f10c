"""Matrix products straight from block-quantized codes, in float32 arithmetic. Compiled by Numba at first use.

One token at a time, a CPU spends its time reading weights. A GGUF weight is d * q + m with q in one byte and d, m
shared by 32 neighbours: multiplying from q reads a quarter of the bytes of float32 and computes the same sums,

    sum_k w[k] x[k]  =  sum over blocks of  d * sum q[k] x[k]  +  m * sum x[k].

The inner kernel is written in LLVM's own vector instructions, because compilers do not find it: 16 rows lie side by
side in one vector, every code is read and converted once, and the sums of up to 8 tokens stay in registers. LLVM splits
the vectors where the machine's are shorter.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, float32, njit, prange, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from blockpilot.models.block_codes import BLOCK, GROUP

MAX_TILE = 8  # tokens whose sums fit into registers

_Array = NDArray[np.float32]


@intrinsic
def _tile(typingctx, codes, scales, offsets, x, x_sums, out, places, num_tokens):  # type: ignore[no-untyped-def]
    """One group of rows times 1 .. MAX_TILE tokens, with code of its own for each number of tokens.

    The arguments are flat arrays, then `places`: where in each to start, the number of blocks, and the distance from
    one token to the next in x, x_sums and out.
    """
    return types.void(codes, scales, offsets, x, x_sums, out, places, num_tokens), _emit_tiles


def _emit_tiles(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM code of all tiles, and the switch between them."""
    end = builder.append_basic_block("end")
    switch = builder.switch(args[7], end)
    for num_tokens in range(1, MAX_TILE + 1):
        block = builder.append_basic_block(f"tile_{num_tokens}")
        switch.add_case(ir.Constant(args[7].type, num_tokens), block)
        builder.position_at_end(block)
        _emit_tile(context, builder, signature, args, num_tokens)
        builder.branch(end)
    builder.position_at_end(end)
    return context.get_dummy_value()


def _emit_tile(context: Any, builder: Any, signature: Any, args: Any, num_tokens: int) -> None:
    """LLVM code of the tile for one number of tokens."""
    num_ways = max(1, MAX_TILE // 2 // num_tokens)  # independent sums per token, so that no addition waits for the last
    codes, scales, offsets, x, x_sums, out = (
        context.make_array(kind)(context, builder, value).data
        for kind, value in zip(signature.args[:6], args[:6], strict=True)
    )
    places = cgutils.unpack_tuple(builder, args[6])
    code_at, scale_at, x_at, sums_at, out_at, num_blocks, x_stride, sums_stride, out_stride = places
    floats, bytes_ = ir.VectorType(ir.FloatType(), GROUP), ir.VectorType(ir.IntType(8), GROUP)
    zero = ir.Constant(floats, [0.0] * GROUP)
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fmuladd.v{GROUP}f32"
    )

    def constant(value: int) -> ir.Constant:
        return ir.Constant(ir.IntType(64), value)

    def step(start: Any, count: int, stride: Any) -> Any:
        return builder.add(start, builder.mul(constant(count), stride))

    def read(pointer: Any, at: Any, kind: ir.VectorType, align: int) -> Any:
        return builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()), align=align)

    def spread(pointer: Any, at: Any) -> Any:
        """One number in every lane."""
        undefined = ir.Constant(floats, ir.Undefined)
        first = builder.insert_element(
            undefined, builder.load(builder.gep(pointer, [at])), ir.Constant(cgutils.int32_t, 0)
        )
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(cgutils.int32_t, GROUP), [0] * GROUP))

    tokens = range(num_tokens)
    totals = [cgutils.alloca_once(builder, floats) for _ in tokens]
    for total in totals:
        builder.store(zero, total)
    with cgutils.for_range(builder, num_blocks) as loop:
        first_code = builder.add(code_at, builder.mul(loop.index, constant(BLOCK * GROUP)))
        first_x = [builder.add(step(x_at, t, x_stride), builder.mul(loop.index, constant(BLOCK))) for t in tokens]
        sums = [[zero] * num_ways for _ in tokens]
        for k in range(BLOCK):
            code = read(codes, builder.add(first_code, constant(k * GROUP)), bytes_, 1)
            weight = builder.sitofp(code, floats)
            for t in tokens:
                value = spread(x, builder.add(first_x[t], constant(k)))
                sums[t][k % num_ways] = builder.call(multiply_add, [weight, value, sums[t][k % num_ways]])
        first_scale = builder.add(scale_at, builder.mul(loop.index, constant(GROUP)))
        scale, offset = read(scales, first_scale, floats, 4), read(offsets, first_scale, floats, 4)
        for t in tokens:
            block_sum = sums[t][0]
            for other in sums[t][1:]:
                block_sum = builder.fadd(block_sum, other)
            total = builder.call(multiply_add, [scale, block_sum, builder.load(totals[t])])
            x_sum = spread(x_sums, builder.add(step(sums_at, t, sums_stride), loop.index))
            builder.store(builder.call(multiply_add, [offset, x_sum, total]), totals[t])
    for t in tokens:
        pointer = builder.bitcast(builder.gep(out, [step(out_at, t, out_stride)]), floats.as_pointer())
        builder.store(builder.load(totals[t]), pointer, align=4)


def _multiply(codes, scales, offsets, x, out, num_parts):  # type: ignore[no-untyped-def]  # pragma: no cover
    """out [T, rows] = x [T, K] times codes [groups, blocks, 32, 16]; groups are shared out over `num_parts` threads."""
    num_groups, num_blocks = codes.shape[0], codes.shape[1]
    num_tokens, width, num_rows = x.shape[0], x.shape[1], out.shape[1]
    x_sums = np.empty((num_tokens, num_blocks), np.float32)
    for t in range(num_tokens):
        for b in range(num_blocks):
            total = float32(0)
            for j in range(BLOCK):
                total += x[t, b * BLOCK + j]
            x_sums[t, b] = total
    for part in prange(num_parts):
        for g in range(part * num_groups // num_parts, (part + 1) * num_groups // num_parts):
            code_at, scale_at = g * num_blocks * BLOCK * GROUP, g * num_blocks * GROUP
            for t in range(0, num_tokens, MAX_TILE):
                places = (
                    code_at, scale_at, t * width, t * num_blocks, g * GROUP + t * num_rows,
                    num_blocks, width, num_blocks, num_rows,
                )  # fmt: skip
                _tile(codes, scales, offsets, x, x_sums, out, places, min(num_tokens - t, MAX_TILE))  # type: ignore[call-arg]


# With one thread the parallel form must not run: it would wake a whole pool that spins beside the one that works.
_serial = njit(fastmath=True, nogil=True, cache=True)(_multiply)
_parallel = njit(fastmath=True, nogil=True, parallel=True, cache=True)(_multiply)


def multiply(
    codes: NDArray[np.int8], scales: _Array, offsets: _Array, x: _Array, out: _Array, num_threads: int
) -> None:  # the arrays are described in `_multiply`
    if num_threads == 1:
        _serial(codes, scales, offsets, x, out, 1)
        return
    if num_threads < config.NUMBA_NUM_THREADS:  # type: ignore[attr-defined]
        set_num_threads(num_threads)
    _parallel(codes, scales, offsets, x, out, num_threads)


@njit(fastmath=True, nogil=True, cache=True)
def normalize(x, weight, eps, out):  # type: ignore[no-untyped-def]  # pragma: no cover
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row."""
    for t in range(x.shape[0]):
        total = float32(0)
        for k in range(x.shape[1]):
            total += x[t, k] * x[t, k]
        scale = float32(1) / np.sqrt(total / float32(x.shape[1]) + eps)
        for k in range(x.shape[1]):
            out[t, k] = x[t, k] * scale * weight[k]
