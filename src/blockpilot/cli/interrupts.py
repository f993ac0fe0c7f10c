"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever it happens to be, and some places (finalizers, callbacks of libraries) swallow
it. A loop that asks `check` at every turn notices it all the same.
"""

import signal
from types import FrameType
from typing import Any


class Interrupts:
    def __init__(self) -> None:
        self._is_received = False
        self._previous: Any = None

    def __enter__(self) -> "Interrupts":
        try:
            self._previous = signal.signal(signal.SIGINT, self._receive)
        except ValueError:  # only the main thread may; elsewhere signals are not ours to handle
            self._previous = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        if self._is_received:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_received = True
        raise KeyboardInterrupt
