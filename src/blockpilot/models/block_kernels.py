"""Matrix products straight from block-quantized codes, in float32 arithmetic. Compiled by Numba at first use.

One token at a time, a CPU spends its time reading weights. A GGUF weight is d * q + m with q in one byte and d, m
shared by 32 neighbours: multiplying from q reads a third of the bytes of float32 and computes the same sums,

    sum_k w[k] x[k]  =  sum over blocks of  d * sum q[k] x[k]  +  m * sum x[k].

Rows lie in groups of 64 side by side, so that the inner loop runs over rows: it needs no horizontal sums and compilers
turn it into vector code. The unrolled sums below are what makes that happen; loops over k would not be vectorised.
"""

import numpy as np
from numba import config, float32, njit, prange, set_num_threads
from numpy.typing import NDArray

ROWS = 64  # rows per group
BLOCK = 32  # weights that share a scale and an offset

Array = NDArray[np.float32]


@njit(fastmath=True, nogil=True, cache=True)
def _one_token(codes, scales, offsets, x, x_sums, out, sums):  # type: ignore[no-untyped-def]  # pragma: no cover
    """One group of rows times one token: codes [blocks, 32, 64], x [K], out [64]."""
    for r in range(ROWS):
        out[r] = 0
    for b in range(scales.shape[0]):
        q = codes[b]
        for r in range(ROWS):
            sums[r] = 0
        for j in range(0, BLOCK, 8):
            k = b * BLOCK + j
            x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            x4, x5, x6, x7 = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
            q0, q1, q2, q3, q4, q5, q6, q7 = q[j], q[j + 1], q[j + 2], q[j + 3], q[j + 4], q[j + 5], q[j + 6], q[j + 7]
            for r in range(ROWS):
                sums[r] += (
                    float32(q0[r]) * x0 + float32(q1[r]) * x1 + float32(q2[r]) * x2 + float32(q3[r]) * x3
                    + float32(q4[r]) * x4 + float32(q5[r]) * x5 + float32(q6[r]) * x6 + float32(q7[r]) * x7
                )  # fmt: skip
        total = x_sums[b]
        d, m = scales[b], offsets[b]
        for r in range(ROWS):
            out[r] += d[r] * sums[r] + m[r] * total


@njit(fastmath=True, nogil=True, cache=True)
def _four_tokens(codes, scales, offsets, x, x_sums, out, sums, first, row):  # type: ignore[no-untyped-def]  # pragma: no cover
    """One group of rows times four tokens: every code is read and converted once."""
    xa, xb, xc, xd = x[first], x[first + 1], x[first + 2], x[first + 3]
    oa, ob = out[first, row : row + ROWS], out[first + 1, row : row + ROWS]
    oc, od = out[first + 2, row : row + ROWS], out[first + 3, row : row + ROWS]
    sa, sb, sc, sd = sums[0], sums[1], sums[2], sums[3]
    for r in range(ROWS):
        oa[r] = 0
        ob[r] = 0
        oc[r] = 0
        od[r] = 0
    for b in range(scales.shape[0]):
        q = codes[b]
        for r in range(ROWS):
            sa[r] = 0
            sb[r] = 0
            sc[r] = 0
            sd[r] = 0
        for j in range(0, BLOCK, 4):
            k = b * BLOCK + j
            a0, a1, a2, a3 = xa[k], xa[k + 1], xa[k + 2], xa[k + 3]
            b0, b1, b2, b3 = xb[k], xb[k + 1], xb[k + 2], xb[k + 3]
            c0, c1, c2, c3 = xc[k], xc[k + 1], xc[k + 2], xc[k + 3]
            d0, d1, d2, d3 = xd[k], xd[k + 1], xd[k + 2], xd[k + 3]
            q0, q1, q2, q3 = q[j], q[j + 1], q[j + 2], q[j + 3]
            for r in range(ROWS):
                w0, w1, w2, w3 = float32(q0[r]), float32(q1[r]), float32(q2[r]), float32(q3[r])
                sa[r] += w0 * a0 + w1 * a1 + w2 * a2 + w3 * a3
                sb[r] += w0 * b0 + w1 * b1 + w2 * b2 + w3 * b3
                sc[r] += w0 * c0 + w1 * c1 + w2 * c2 + w3 * c3
                sd[r] += w0 * d0 + w1 * d1 + w2 * d2 + w3 * d3
        d, m = scales[b], offsets[b]
        ta, tb, tc, td = x_sums[first, b], x_sums[first + 1, b], x_sums[first + 2, b], x_sums[first + 3, b]
        for r in range(ROWS):
            oa[r] += d[r] * sa[r] + m[r] * ta
            ob[r] += d[r] * sb[r] + m[r] * tb
            oc[r] += d[r] * sc[r] + m[r] * tc
            od[r] += d[r] * sd[r] + m[r] * td


def _multiply(codes, scales, offsets, x, out, num_parts):  # type: ignore[no-untyped-def]  # pragma: no cover
    """out [T, rows] = x [T, K] times codes [groups, blocks, 32, 64]; groups are shared out over `num_parts` threads."""
    num_groups, num_tokens = codes.shape[0], x.shape[0]
    x_sums = np.empty((num_tokens, codes.shape[1]), np.float32)
    for t in range(num_tokens):
        for b in range(codes.shape[1]):
            total = float32(0)
            for j in range(BLOCK):
                total += x[t, b * BLOCK + j]
            x_sums[t, b] = total
    for part in prange(num_parts):
        sums = np.empty((4, ROWS), np.float32)
        for g in range(part * num_groups // num_parts, (part + 1) * num_groups // num_parts):
            row = g * ROWS
            if num_tokens < 4:
                for t in range(num_tokens):
                    _one_token(codes[g], scales[g], offsets[g], x[t], x_sums[t], out[t, row : row + ROWS], sums[0])
            else:
                for t in range(0, num_tokens, 4):  # the last four may overlap those before: cheaper than one by one
                    first = min(t, num_tokens - 4)
                    _four_tokens(codes[g], scales[g], offsets[g], x, x_sums, out, sums, first, row)


# With one thread the parallel form must not run: it would wake a whole pool that spins beside the one that works.
_serial = njit(fastmath=True, nogil=True, cache=True)(_multiply)
_parallel = njit(fastmath=True, nogil=True, parallel=True, cache=True)(_multiply)


def multiply(
    codes: NDArray[np.int8], scales: Array, offsets: Array, x: Array, out: Array, num_threads: int
) -> None:  # the arrays are described in `_multiply`
    if num_threads == 1:
        _serial(codes, scales, offsets, x, out, 1)
        return
    set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
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
