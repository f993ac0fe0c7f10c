"""Whether pilots decide in machine code or in Python: the one place that knows."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def load_compiled() -> ModuleType | None:
    """`compiled.py`, ready to run, where Numba is installed; None: Python decides the same, more slowly.

    The first call takes half a second, or several where nothing is kept on disk yet, so pilots ask when they are made.
    """
    return import_module("blockpilot.pilots.compiled") if find_spec("numba") is not None else None
