"""A device that is as late as it can be. Elsewhere in these tests a pass is over as soon as it is begun."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from blockpilot.decoding import planned_dflash
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.engine import engine, joint_step, plain_step, planned_runner
from blockpilot.engine.runner import TargetRunner
from blockpilot.models.gpu import Stopwatch


class LateDevice:
    """Runs what was recorded when somebody waits for it, and no earlier."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.marks: dict[tuple[Stopwatch, int], int] = {}  # places in the queue, counted from the beginning
        self.num_done = 0

    def capture(self, run: Callable[[], None], *_: object) -> Callable[[], None]:
        is_through = self.num_done >= max(self.marks.values(), default=0)
        assert is_through, "recorded while a step is on its way, whose plan it may write"
        self.work()
        run()  # recording does, to warm up
        return lambda: self.queue.append(run)

    def work(self, up_to: int | None = None) -> None:
        while self.queue and (up_to is None or self.num_done < up_to):
            self.queue.pop(0)()
            self.num_done += 1

    def mark(self, watch: Stopwatch, index: int) -> None:
        self.marks[watch, index] = self.num_done + len(self.queue)

    def wait(self, watch: Stopwatch, index: int) -> None:
        self.work(self.marks.get((watch, index), 0))

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def first(run: Callable[..., Any]) -> Callable[..., Any]:
            """What is not recorded runs behind what is."""

            def run_behind(*arguments: Any, **options: Any) -> Any:
                self.work()
                return run(*arguments, **options)

            return run_behind

        for owner, name in ((DFlashDrafter, "observe"), (TargetRunner, "prefill"), (TargetRunner, "verify")):
            monkeypatch.setattr(owner, name, first(getattr(owner, name)))
        modules: tuple[ModuleType, ...] = (planned_runner, planned_dflash, joint_step, plain_step, engine)
        for module in modules:
            monkeypatch.setattr(module, "capture", self.capture, raising=False)
            monkeypatch.setattr(module, "wait_for", lambda device: self.work(), raising=False)
        monkeypatch.setattr(Stopwatch, "mark", lambda watch, index: self.mark(watch, index))
        monkeypatch.setattr(Stopwatch, "wait", lambda watch, index: self.wait(watch, index))


class Runs(list[int]):
    """How many requests each step had."""

    def __init__(self) -> None:
        self.ahead: list[bool] = []  # whether it was begun before the one before had landed


@pytest.fixture(params=["at once", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice | None:
    """The two extremes; None is the one that is always through."""
    if request.param == "at once":
        return None
    late = LateDevice()
    late.use(monkeypatch)
    return late
