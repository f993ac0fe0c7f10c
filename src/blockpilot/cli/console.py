"""How commands talk to people: results on standard output, everything else on standard error.

Progress is drawn only where somebody watches; in a log file it would be noise.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Report = Callable[[str, int, int], None]  # (message, done, in all); downloads count bytes


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line; non-ASCII characters are escaped, so that every terminal and pipe carries them."""
    print(json.dumps(value))


def print_note(message: str) -> None:
    """A line for people, on standard error."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(message, style="dim"))


def print_columns(columns: Mapping[str, Sequence[str]], *, to_stderr: bool = False) -> None:
    """A small borderless table: heading -> cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading, no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))  # as Text: a path may hold square brackets
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = 1000  # nobody watches: never cut a path short
    console.print(table)


@contextlib.contextmanager
def show_progress(waiting_for: str) -> Iterator[Report]:
    """Draw a pulsing line with `waiting_for`, and a real bar while the yielded function reports bytes."""
    if not sys.stderr.isatty():
        yield _report_in_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    description, amount = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[amount]}")
    columns = (SpinnerColumn(), description, BarColumn(), amount)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(waiting_for, total=None, amount="")

        def report(message: str, done: int, total: int) -> None:
            if done < total:
                progress.update(task, description=message, completed=done, total=total, amount=_amount(done, total))
            else:
                progress.reset(task, description=waiting_for, total=None, amount="")

        yield report


@contextlib.contextmanager
def show_counted(what: str, seconds_between_lines: float = 5.0) -> Iterator[Report]:
    """A bar for whoever watches, a line every few seconds in a log; the message names what was just done."""
    if not sys.stderr.isatty():
        yield _count_in_lines(what, seconds_between_lines)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda message, done, total: progress.update(task, description=message, completed=done, total=total)


def _count_in_lines(what: str, seconds_between: float) -> Report:
    last = float("-inf")

    def report(message: str, done: int, total: int) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last > seconds_between:
            last = time.monotonic()
            print(f"{done:,} of {total:,} {what}: {message}", file=sys.stderr, flush=True)

    return report


def _report_in_lines() -> Report:
    """For logs: one line when something long begins."""
    seen: set[str] = set()

    def report(message: str, done: int, total: int) -> None:
        if message not in seen:
            seen.add(message)
            print(f"{message} ({format_megabytes(total)})", file=sys.stderr)

    return report


def _amount(done: int, total: int) -> str:
    return f"{done / 1e6:.1f} / {format_megabytes(total)}"


def format_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
