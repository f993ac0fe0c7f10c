"""Progress is drawn where somebody watches, and printed as plain lines where nobody does; Ctrl-C is never lost."""

import contextlib
import io
import signal

import pytest

from blockpilot.cli.console import ProgressLines, print_columns, show_progress, watch_interrupts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pretend_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_progress_on_a_terminal_is_drawn_and_wiped(monkeypatch):
    terminal = pretend_terminal(monkeypatch)
    with show_progress("loading [b]tiny") as report:
        report("downloading tiny", 1_000_000, 4_000_000)
        report("downloading tiny", 4_000_000, 4_000_000)
    assert "loading [b]tiny" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased again


def test_progress_survives_an_error(monkeypatch):
    terminal = pretend_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), show_progress("loading tiny"):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is visible again


def test_quiet_work_leaves_no_trace_in_a_log(capsys):
    with show_progress("loading tiny"):
        pass
    assert tuple(capsys.readouterr()) == ("", "")


def test_long_cells_are_never_cut_in_a_log(capsys):
    print_columns({"path": ["x" * 300], "note": ["[bold]no markup"]})
    output = capsys.readouterr().out
    assert "x" * 300 in output
    assert "[bold]no markup" in output


def test_progress_lines_are_few(capsys):
    report = ProgressLines()
    for done in range(1, 101):
        report("work", done, 100)
    assert capsys.readouterr().err.splitlines() == ["work: 1 of 100", "work: 100 of 100"]


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with watch_interrupts() as check:
        check()
        with contextlib.suppress(BaseException):  # as a finalizer does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_raised_at_once() -> None:
    with watch_interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
