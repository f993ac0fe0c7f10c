"""How commands talk to people: results on standard output, everything else on standard error.

Progress is drawn only where somebody watches; in a log file it would be noise.
"""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from blockpilot.core.progress import Report

if TYPE_CHECKING:
    from rich.table import Table

_SECONDS_BETWEEN_LINES = 5.0  # of a log


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line; non-ASCII characters are escaped, so that every terminal and pipe carries them."""
    print(json.dumps(value))


def print_result(value: Mapping[str, Any], *lines: str, is_json: bool) -> None:
    """What a command found out: one JSON object, or the lines that say it to people."""
    if is_json:
        print_json(value)
    else:
        print(*lines, sep="\n")


def print_note(message: str) -> None:
    """A line for people, on standard error."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(message, style="dim"))


def make_table() -> "Table":
    """A small borderless table, still empty."""
    from rich.table import Table

    return Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))


def print_table(table: "Table", footer: str = "", *, to_stderr: bool = False) -> None:
    from rich.console import Console

    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = 1000  # nobody watches: never cut a cell short
    console.print(table)
    if footer:
        console.print(footer, style="dim", highlight=False)


def print_columns(columns: Mapping[str, Sequence[str]], *, to_stderr: bool = False) -> None:
    """A table of heading -> cells."""
    from rich.text import Text

    table = make_table()
    for heading in columns:
        table.add_column(heading, no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))  # as Text: a path may hold square brackets
    print_table(table, to_stderr=to_stderr)


@contextlib.contextmanager
def show_progress(waiting_for: str) -> Iterator[Report]:
    """Draw a pulsing line with `waiting_for`, and a real bar while the yielded function reports bytes."""
    if not sys.stderr.isatty():
        seen: set[str] = set()  # a log gets one line when something long begins

        def report_once(message: str, done: int, total: int) -> None:
            if message not in seen:
                seen.add(message)
                print(f"{message} ({format_megabytes(total)})", file=sys.stderr)

        yield report_once
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    description, amount = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[amount]}")
    columns = (SpinnerColumn(), description, BarColumn(), amount)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(waiting_for, total=None, amount="")

        def report(message: str, done: int, total: int) -> None:
            if done < total:
                amount = f"{done / 1e6:.1f} / {format_megabytes(total)}"
                progress.update(task, description=message, completed=done, total=total, amount=amount)
            else:
                progress.reset(task, description=waiting_for, total=None, amount="")

        yield report


@contextlib.contextmanager
def show_counted(what: str) -> Iterator[Report]:
    """A bar for whoever watches, a line every few seconds in a log; the message names what was just done."""
    if not sys.stderr.isatty():
        yield ProgressLines("{done:,} of {total:,} " + what + ": {message}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda message, done, total: progress.update(task, description=message, completed=done, total=total)


class ProgressLines:
    """One line every few seconds, and the last one: long work stays visible in terminals and logs alike."""

    def __init__(self, form: str = "{message}: {done:,} of {total:,}") -> None:
        self.form, self.last = form, float("-inf")

    def __call__(self, message: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self.last > _SECONDS_BETWEEN_LINES:
            self.last = now
            print(self.form.format(message=message, done=done, total=total), file=sys.stderr, flush=True)


def format_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def watch_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM that cannot get lost.

    Python raises KeyboardInterrupt wherever it happens to be, and some places (finalizers, callbacks of libraries)
    swallow it. A loop that calls the yielded function at every turn notices it all the same.
    """
    received: list[type[KeyboardInterrupt]] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        raise received[0]

    def check() -> None:
        if received:
            raise received[0]

    with _handling(receive, signal.SIGINT, signal.SIGTERM):
        yield check


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever works on Ctrl-C works on it as well."""


@contextlib.contextmanager
def heed_terminations() -> Iterator[None]:
    """While active, SIGTERM ends work as Ctrl-C does: what can be kept is kept, what was begun is cleaned up."""

    def receive(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handling(receive, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handling(receive: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # elsewhere signals are not ours to handle
        yield
        return
    previous = [(number, signal.signal(number, receive)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
