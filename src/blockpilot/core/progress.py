"""How long work tells how far it is, and how long the rest will take."""

import time
from collections.abc import Callable

Report = Callable[[str, int, int], None]  # (what, done, in all)


class Progress:
    """Things done, with the time that the rest will take at the pace of this session."""

    def __init__(self, report: Report, total: int) -> None:
        self.report, self.total = report, total
        self.done = self.skipped = 0
        self.started = time.perf_counter()

    def prepare(self, what: str) -> None:
        """Not counted: the pace is that of things done alone."""
        self.report(what, self.done, self.total)

    def start(self) -> None:
        self.started, self.skipped = time.perf_counter(), self.done

    def skip(self, count: int) -> None:
        """Done before, or never to be done."""
        self.done += count
        self.skipped += count

    def advance(self, what: str, count: int = 1) -> None:
        self.done += count
        pace = (time.perf_counter() - self.started) / (self.done - self.skipped)
        self.report(f"{what} ({format_duration(pace * (self.total - self.done))} left)", self.done, self.total)


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
