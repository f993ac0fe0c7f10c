"""Whether pilots decide in machine code or in Python: the one place that knows."""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger(__name__)


@cache
def load_compiled() -> ModuleType | None:
    """`compiled/`, ready to run, where Numba is installed; None: Python decides the same, more slowly.

    The first call takes half a second, or several where nothing is kept on disk yet, so pilots ask when they are made.
    """
    if find_spec("numba") is None:
        return None
    try:
        return import_module("blockpilot.pilots.compiled")
    except ImportError as error:  # installed, but not for this Python or NumPy
        logger.warning("Numba cannot be used (%s): pilots decide in Python, more slowly", error)
        return None
