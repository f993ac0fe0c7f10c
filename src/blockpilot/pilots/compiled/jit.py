"""How the pilots' functions are compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit

# Helpers own no memory: without reference counts, which would take longer than the arithmetic. For the same reason no
# division looks for zeros, and what a loop of exponentials computes is summed in a loop of its own.
helper = njit(  # type: ignore[call-overload]
    _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy"
)


def compiled(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Machine code for one signature, at once. Numba refuses to keep it where no folder may be written to."""

    def compile_now(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:
            return njit(signature, error_model="numpy")(function)

    return compile_now
