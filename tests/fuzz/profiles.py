"""How many examples the tests of this folder try: few by themselves, many under `make fuzz`."""

import os
import re
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.core.errors import BlockPilotError, InputError

IS_LONG = bool(os.environ.get("BLOCKPILOT_FUZZ"))  # set by `make fuzz`
_FEW, _MANY = 25, 1500
SOURCES = st.integers(0, 2**32).map(Random)


def fuzz(*strategies: Any, share: float = 1.0) -> Callable[[Any], Any]:
    """Examples for the last arguments of a test; `share` of them where each takes long. Few are always the same."""
    count = max(1, int(share * (_MANY if IS_LONG else _FEW)))
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    limits = settings(max_examples=count, deadline=None, derandomize=not IS_LONG, suppress_health_check=checks)
    return lambda test: limits(given(*strategies)(test))


def refuses(work: Callable[[], Any]) -> bool:
    """Whether bad input is refused, in one line that can be shown. Anything else that is raised fails the test."""
    try:
        work()
    except InputError as error:
        check_line(error)
        return True
    return False


def check_line(error: BlockPilotError) -> None:
    text = str(error)
    assert text.strip() and len(text) < 2000, text[:2000]
    assert not re.search(r"\wError\b", text), text  # the name of what nobody foresaw
