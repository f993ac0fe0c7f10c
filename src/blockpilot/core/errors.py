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
