"""When requests are sent: at their times whatever the server does, or when a client has its last answer."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockpilot.loadtest.config import Load
from blockpilot.loadtest.prompts import Prompt, arrivals
from blockpilot.loadtest.records import Record

Send = Callable[[Prompt, int, float], Awaitable[Record]]  # (prompt, number, planned time)
Note = Callable[[Record], None]
_Ask = Callable[[int, float], Coroutine[Any, Any, None]]


@dataclass
class Run:
    """One load, as far as it got."""

    load: Load
    num_requests: int
    began: float = 0.0
    records: list[Record] = field(default_factory=list)  # in the order of their ends
    client_share: float | None = None  # of one processor, used by the client itself

    @property
    def is_complete(self) -> bool:
        return len(self.records) == self.num_requests

    @property
    def duration(self) -> float:
        return max((record.ended for record in self.records), default=self.began) - self.began


async def drive(run: Run, prompts: Sequence[Prompt], send: Send, note: Note, *, seed: int) -> None:
    """All requests of a load; each is noted when it ends."""

    async def ask(number: int, planned: float) -> None:
        run.records.append(await send(prompts[number], number, planned))
        note(run.records[-1])

    busy = time.process_time()
    run.began = time.perf_counter()
    if run.load.rate is not None:
        await _drive_open([run.began + at for at in arrivals(run.load.rate, len(prompts), seed)], ask)
    else:
        await _drive_closed(run.load.concurrency or 1, len(prompts), ask)
    run.client_share = (time.process_time() - busy) / max(time.perf_counter() - run.began, 1e-9)


async def _drive_open(times: Sequence[float], ask: _Ask) -> None:
    async with asyncio.TaskGroup() as group:
        for number, planned in enumerate(times):
            if (wait := planned - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(ask(number, planned))


async def _drive_closed(concurrency: int, count: int, ask: _Ask) -> None:
    numbers = itertools.count()

    async def be_client() -> None:
        while (number := next(numbers)) < count:
            await ask(number, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(be_client())
