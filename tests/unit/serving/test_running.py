"""Signals reach a server whatever its main thread does."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from blockpilot.serving.engine_side import EngineSide
from blockpilot.serving.running import _draining

LONG = 600_000  # rounds: some tenths of a second in which no handler of Python's runs


class Side:
    """An engine's side that notes when it is told to end."""

    is_busy = True

    def __init__(self) -> None:
        self.drained: list[tuple[float, float]] = []  # when, and how long answers may take

    def drain(self, seconds: float) -> None:
        self.drained.append((time.monotonic(), seconds))


def drain_by(act: Callable[[], None], said: list[str]) -> Side:
    side = Side()
    with _draining(cast(EngineSide, side), 7.0, said.append):
        act()
    return side


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_while_the_main_thread_looks_at_none(number: int) -> None:
    ended: list[float] = []

    def act() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        hashlib.pbkdf2_hmac("sha256", b"key", b"salt", LONG)
        ended.append(time.monotonic())

    said: list[str] = []
    side = drain_by(act, said)
    assert [seconds for _, seconds in side.drained] == [7.0]
    assert side.drained[0][0] < ended[0] and said == ["finishing answers, at most 7 s; once more ends them now"]


def test_a_second_signal_means_now() -> None:
    def act() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    assert [seconds for _, seconds in drain_by(act, []).drained] == [7.0, 0.0]


def test_what_handled_signals_before_does_so_again() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert drain_by(lambda: None, []).drained == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
