"""Ctrl-C ends a loop even where something in it swallows the exception."""

import contextlib
import signal

import pytest

from blockpilot.cli.interrupts import Interrupts


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(BaseException):  # as a finalizer does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_raised_at_once() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
