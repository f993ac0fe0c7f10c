"""Bounds of options: both ends are allowed, what lies beyond them is named, and so is what is no number."""

from types import SimpleNamespace

import pytest

from blockpilot.core.errors import InputError, require_at_least, require_at_most


@pytest.mark.parametrize("value", [0, 0.5, 10, None])
def test_what_lies_between_passes(value: float | None) -> None:
    given = SimpleNamespace(max_seconds=value)
    require_at_least(given, max_seconds=0)
    require_at_most(given, max_seconds=10)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("-inf")])
def test_too_little_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="--max-seconds must be at least 0, got"):
        require_at_least(SimpleNamespace(max_seconds=value), max_seconds=0)


@pytest.mark.parametrize("value", [10.1, float("nan"), float("inf")])
def test_too_much_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="--max-seconds must be at most 10, got"):
        require_at_most(SimpleNamespace(max_seconds=value), max_seconds=10)
