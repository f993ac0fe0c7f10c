"""A device that is as late as it can be. Elsewhere in these tests a pass is over as soon as it is begun."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest

from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.step import StepRequest
from blockpilot.decoding.target import TargetRunner
from blockpilot.engine import assemble, engine, step_timing
from blockpilot.engine.llm import LLM
from blockpilot.gpu import dflash, step, target, views
from blockpilot.gpu.device import Stopwatch
from blockpilot.gpu.step import DeviceExecutor, Ticket
from tests.tiny import make_llm


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
        modules: tuple[ModuleType, ...] = (target, dflash, views, step, step_timing, engine)
        for module in modules:
            monkeypatch.setattr(module, "capture", self.capture, raising=False)
            monkeypatch.setattr(module, "wait_for", lambda device: self.work(), raising=False)
        monkeypatch.setattr(Stopwatch, "mark", lambda watch, index: self.mark(watch, index))
        monkeypatch.setattr(Stopwatch, "wait", lambda watch, index: self.wait(watch, index))


@dataclass
class Runs:
    """The steps that a device has taken."""

    num_requests: list[int] = field(default_factory=list)
    is_ahead: list[bool] = field(default_factory=list)  # whether it was enqueued before the one before had landed
    is_plain: list[bool] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.num_requests)

    def note(self, ticket: Ticket | None, num_requests: int, *, is_ahead: bool) -> None:
        if ticket is not None:
            self.num_requests.append(num_requests)
            self.is_ahead.append(is_ahead)
            self.is_plain.append(ticket.step.draft is None)

    def drafted(self) -> list[int]:
        """Requests of each step with a draft."""
        return [count for count, is_plain in zip(self.num_requests, self.is_plain, strict=True) if not is_plain]

    def clear(self) -> None:
        for noted in (self.num_requests, self.is_ahead, self.is_plain):
            noted.clear()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    counted, begin, follow = Runs(), DeviceExecutor.begin, DeviceExecutor.follow

    def count(self: DeviceExecutor, requests: Sequence[StepRequest]) -> Ticket | None:
        ticket = begin(self, requests)
        counted.note(ticket, len(requests), is_ahead=False)
        return ticket

    def count_ahead(self: DeviceExecutor, ticket: Ticket, positions: Sequence[int | None]) -> Ticket | None:
        following = follow(self, ticket, positions)
        counted.note(following, len(positions) - positions.count(None), is_ahead=True)
        return following

    monkeypatch.setattr(DeviceExecutor, "begin", count)
    monkeypatch.setattr(DeviceExecutor, "follow", count_ahead)
    return counted


def make_gpu_llm(name: str = "qwen3", *, with_device_steps: bool = True, **options: object) -> LLM:
    """An engine with a GPU's passes, on a CPU, with the kernels' reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "can_fuse", lambda *given: True)
        llm = make_llm(name, **options)  # type: ignore[arg-type]
    if not with_device_steps:
        llm.engine.pipeline.loop = replace(llm.engine.pipeline.loop, executors=llm.engine.pipeline.loop.executors[-1:])
    return llm


@pytest.fixture(params=["at once", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice | None:
    """The two extremes; None is the one that is always through."""
    if request.param == "at once":
        return None
    late = LateDevice()
    late.use(monkeypatch)
    return late
