"""The two ways BlockPilot fails on purpose.

Every error a user can cause is an `InputError`: one line that says what was wrong and what to do. The command line
prints it without a traceback and exits with 2. Everything else that is foreseen (a failed download, a full disk) is a
plain `BlockPilotError` and exits with 1.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockpilot.core.records import Completion


logger = logging.getLogger(__name__)


class BlockPilotError(Exception):
    """A foreseen failure, described in one line."""

    exit_code = 1


class InputError(BlockPilotError):
    """Bad input: the message names what was wrong and what to do instead."""

    exit_code = 2


class RequestFailedError(BlockPilotError):
    """A request ended with an error of its own. `completions` are those of all that were asked with it, also its own:
    they have what was written until then, and the others have finished."""

    def __init__(self, message: str, completions: Sequence["Completion"] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


def require_at_least(values: object, **least: int) -> None:
    """Check options, or the fields of a configuration that are named like options; None stands for a default."""
    for name, bound in least.items():
        value = getattr(values, name)
        if value is not None and not value >= bound:  # nan is refused, too
            raise InputError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def require_at_most(values: object, **most: float) -> None:
    """The same for upper bounds: what nobody could wait for, or hold in memory, is a slip of the finger."""
    for name, bound in most.items():
        value = getattr(values, name)
        if value is not None and not value <= bound:
            raise InputError(f"--{name.replace('_', '-')} must be at most {bound}, got {show_value(value)}")


def show_value(value: object) -> str:
    """A value as an error names it: short, however long it is."""
    try:
        text = repr(value)
    except Exception as error:  # somebody else's __repr__
        text = f"a {type(value).__name__} that has no text ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_failure(what: str, error: BaseException) -> str:
    """One line about an error that nobody foresaw; the log has where it came from."""
    logger.debug("%s", what, exc_info=error)
    reason = " ".join(str(error).split())
    return f"{what} ({type(error).__name__}{': ' if reason else ''}{reason[:200]})"
