"""When requests are sent: at their times, or by clients that wait."""

import asyncio
import math
import time

import pytest

from blockpilot.loadtest.config import Load
from blockpilot.loadtest.driver import Run, drive
from blockpilot.loadtest.prompts import Prompt, arrivals
from blockpilot.loadtest.records import Record

PROMPTS = [Prompt(str(number), ({"role": "user", "content": "x"},)) for number in range(12)]


def drive_load(load: Load, seconds: float, *, seed: int = 0) -> tuple[Run, int]:
    """The run, and how many requests were in flight at most."""
    run, in_flight, most = Run(load, len(PROMPTS)), 0, 0

    async def send(prompt: Prompt, number: int, planned: float) -> Record:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        sent = time.perf_counter()
        await asyncio.sleep(seconds)
        in_flight -= 1
        return Record(number=number, prompt_id=prompt.id, planned=planned, sent=sent, ended=time.perf_counter())

    asyncio.run(drive(run, PROMPTS, send, lambda record: None, seed=seed))
    return run, most


def test_a_rate_waits_for_nobody() -> None:
    run, most = drive_load(Load(rate=200.0), 0.2)
    assert run.is_complete and most > 6  # 12 requests in about 60 ms, each answered after 200
    records = sorted(run.records, key=lambda record: record.number)
    times = arrivals(200.0, len(PROMPTS), 0)
    assert [record.planned - run.began for record in records] == pytest.approx(times)
    assert all(record.sent >= record.planned for record in records)
    assert [record.prompt_id for record in records] == [prompt.id for prompt in PROMPTS]


def test_all_at_once() -> None:
    run, most = drive_load(Load(rate=math.inf), 0.02)
    assert most == len(PROMPTS) and run.duration < 0.5


@pytest.mark.parametrize(("clients", "most"), [(1, 1), (3, 3), (50, 12)])
def test_clients_wait_for_their_answers(clients: int, most: int) -> None:
    run, found = drive_load(Load(concurrency=clients), 0.005)
    assert run.is_complete and found == most
    assert sorted(record.number for record in run.records) == list(range(12))
    assert run.duration >= 0.005 * 12 / clients and run.client_share is not None


def test_who_stops_a_run_stops_it_at_once() -> None:
    run = Run(Load(concurrency=2), len(PROMPTS))

    async def send(prompt: Prompt, number: int, planned: float) -> Record:
        await asyncio.sleep(0.001 if number < 4 else 60)
        return Record(number=number, prompt_id=prompt.id, planned=planned, sent=planned, ended=planned)

    def note(record: Record) -> None:
        if len(run.records) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(drive(run, PROMPTS, send, note, seed=0))
    assert len(run.records) == 4 and not run.is_complete
