"""How the loops are compiled, or left as they are."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)
Function = Callable[..., Any]


def _find_numba() -> Any:
    if find_spec("numba") is None:
        return None
    try:
        import numba
    except ImportError as error:  # installed, but not for this Python or NumPy
        logger.warning("Numba cannot be used (%s): pilots decide in Python, more slowly", error)
        return None
    return numba


numba = _find_numba()


def helper(function: Function) -> Function:
    """A function that only compiled ones call. It owns no memory: counting references takes longer than arithmetic."""
    if numba is None:
        return function
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}  # unchecked division
    compiled: Function = numba.njit(_nrt=False, **options)(function)
    return compiled


def compiled(signature: str) -> Callable[[Function], Function]:
    """Machine code for one signature, at once. Numba refuses to keep it where no folder may be written to."""

    def compile_now(function: Function) -> Function:
        if numba is None:
            return function
        try:
            found: Function = numba.njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:
            found = numba.njit(signature, error_model="numpy")(function)
        return found

    return compile_now
