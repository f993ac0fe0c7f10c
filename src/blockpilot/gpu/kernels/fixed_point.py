"""Sums that have no order: terms are rounded to integers first.

A compiler adds floating-point numbers in an order that follows its layout, and another tile or another number of warps
gives other bits. Integers can be added in any order. A row's own largest number sets the unit, so that nothing
overflows. Every square is two integers of 32 bits, a coarse one and what it leaves over: 30 bits or more below the
largest, which is what a float32 sum keeps.
"""

import triton
import triton.language as tl

EXPONENT = tl.constexpr(0x7F800000)  # the bits of a float32's exponent
LARGEST_EXPONENT = tl.constexpr(254 << 23)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to a number below 2**22 it leaves an integer in the low bits
ROUNDING_BITS = tl.constexpr(0x4B400000)
SHARE_UNIT = tl.constexpr(1099511627776.0)  # 2**40


@triton.jit
def round_to_integer(x):  # type: ignore[no-untyped-def]
    """Numbers below 2**22 as integers, the nearest."""
    return (x + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def power_of(top):  # type: ignore[no-untyped-def]
    """The power of two at or below each number, which is not negative."""
    return (top.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def square_units(x, power, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Squares of x / power, below 4, as coarse and fine integers: sums over rows of up to `PAD` fit into 32 bits."""
    coarse_unit: tl.constexpr = min(1 << 20, (1 << 28) // PAD)
    fine_unit: tl.constexpr = min(1 << 22, (1 << 30) // PAD)
    inverse = (-power.to(tl.int32, bitcast=True) + LARGEST_EXPONENT).to(tl.float32, bitcast=True)
    scaled = x * inverse
    squares = scaled * scaled * coarse_unit
    coarse = round_to_integer(squares)
    return coarse, round_to_integer((squares - coarse.to(tl.float32)) * fine_unit)


@triton.jit  # type: ignore[untyped-decorator]
def inverse_root(coarse, fine, power, size, eps, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean square + eps) from the sums of `square_units`."""
    coarse_unit: tl.constexpr = min(1 << 20, (1 << 28) // PAD)
    fine_unit: tl.constexpr = min(1 << 22, (1 << 30) // PAD)
    total = coarse.to(tl.int64) * fine_unit + fine.to(tl.int64)
    mean = total.to(tl.float32) / coarse_unit / fine_unit / size
    return tl.rsqrt(mean * power * power + eps)


@triton.jit
def share_units(x):  # type: ignore[no-untyped-def]
    """Numbers between 0 and 1 as integers."""
    return (x * SHARE_UNIT).to(tl.int64)
