"""The two ways BlockPilot fails on purpose.

Every error a user can cause is an `InputError`: one line that says what was wrong and what to do. The command line
prints it without a traceback and exits with 2. Everything else that is foreseen (a failed download, a full disk) is a
plain `BlockPilotError` and exits with 1.
"""


class BlockPilotError(Exception):
    """A foreseen failure, described in one line."""

    exit_code = 1


class InputError(BlockPilotError):
    """Bad input: the message names what was wrong and what to do instead."""

    exit_code = 2


def require_at_least(values: object, **least: int) -> None:
    """Check options, or the fields of a configuration that are named like options; None stands for a default."""
    for name, bound in least.items():
        value = getattr(values, name)
        if value is not None and value < bound:
            raise InputError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")
