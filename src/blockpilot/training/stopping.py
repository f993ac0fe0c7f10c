"""Stopping between two steps, not inside one: Ctrl-C and SIGTERM only raise a flag that the loop looks at.

Schedulers announce the end of a machine with SIGTERM and people press Ctrl-C; both mean "save and go". A second signal
means "now": it raises KeyboardInterrupt wherever the program is.
"""

import logging
import signal
from types import FrameType, TracebackType
from typing import Any

import torch

from blockpilot.core.errors import BlockPilotError

logger = logging.getLogger(__name__)


class TrainingStoppedError(BlockPilotError):
    """Somebody asked for the stop; nothing is wrong."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number  # what shells expect


class StopSignals:
    """While active, the first SIGINT or SIGTERM is kept in `received` (0: none yet)."""

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread may; elsewhere signals are not ours to handle
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number
        logger.warning("stopping after this step; once more to stop at once")


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU PyTorch has its own error; on a CPU it is a RuntimeError like any other."""
    is_cpu_error = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu_error or isinstance(error, torch.OutOfMemoryError | MemoryError)
