"""A server under random clients for a long time: `python -m tests.soak.run --count 20000 --seed 0`.

Clients of all manners ask for all that can be asked (`asks.py`). Meanwhile /health is asked every 20 ms. It must hold:
every finished answer is the one of plain decoding, bad calls are refused by their status, /health takes at most 100 ms
(p99; the longest one is shown, and on a machine that does nothing else it has to be shorter, too),
and at the end the server holds no more slots, memory, threads and files than after the first tenth. Then it is told to
end while it answers: answers end in order, and so does the process.

Each ask is drawn from the seed and its number alone: `--first` and `--num-clients 1` try one again.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import torch

from tests.soak.asks import CHAT, Ask, draw_ask
from tests.soak.clients import Clients, Reply, read_events
from tests.soak.judge import Judge
from tests.soak.process import ServerProcess, Use, Watch, running_server, watching
from tests.soak.server import MAX_QUEUE, NUM_SLOTS, make_soak_llm

NUM_CLIENTS = 40
SLOWEST_HEALTH = 100.0  # milliseconds
_MOST_GROWTH = Use(megabytes=48.0, num_threads=8, num_files=2)
_LONGEST_END = 30  # seconds
_REPORT_EVERY = 1000
_SHOWN = 20
Say = Callable[[str], None]


@dataclass
class Soak:
    """What a run has seen."""

    faults: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    health: Watch = field(default_factory=Watch)
    uses: list[Use] = field(default_factory=list)  # after the first tenth, at the end
    seconds: float = 0.0
    num_refusals: int = 0
    num_judged: int = 0
    num_turns: int = 0  # second ones
    num_known: int = 0  # of their tokens
    last_ends: Counter[str] = field(default_factory=Counter)  # of answers in flight when the server was told to end

    def describe(self) -> str:
        p50, p99, most = np.percentile(self.health.answers, (50, 99, 100))
        ends = ", ".join(f"{name} {count:,}" for name, count in self.ends.most_common())
        last = ", ".join(f"{name} {count}" for name, count in self.last_ends.most_common())
        lines = [
            f"{sum(self.ends.values()):,} asks in {self.seconds:.0f} s: {ends}",
            f"{self.num_refusals:,} tries met a full queue",
            f"{self.num_judged:,} answers compared with plain decoding",
            f"{self.num_turns:,} second turns too; {self.num_known:,} of their tokens were known",
            f"/health {len(self.health.answers):,} times: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms; "
            f"who asked was late by {max(self.health.late):.1f} ms at most",
            *(f"{name}: {use}" for name, use in zip(("after a tenth", "at the end"), self.uses, strict=False)),
            f"told to end: {last}",
            f"{len(self.faults)} faults",
        ]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a server at random for a long time, and judge what it does.")
    parser.add_argument("--count", type=int, default=20_000, metavar="N", help="asks (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first ask (default: 0)")
    parser.add_argument("--num-clients", type=int, default=NUM_CLIENTS, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asks = [draw_ask(given.seed, number) for number in range(given.first, given.first + given.count)]
    soak = run(asks, given.num_clients, say)
    say(soak.describe())
    for fault in soak.faults[:_SHOWN]:
        say(f"FAILED {fault}\n  again: python -m tests.soak.run --seed {given.seed} --count 1 --first NUMBER")
    return 1 if soak.faults else 0


def run(asks: Sequence[Ask], num_clients: int, say: Say, *, slowest_health: float = SLOWEST_HEALTH) -> Soak:
    soak, started = Soak(), time.monotonic()
    num_first = max(1, len(asks) // 10)
    replies: list[tuple[Ask, Reply]] = []
    with running_server() as server:
        with watching(server) as health:
            for part in (asks[:num_first], asks[num_first:]):
                replies += asyncio.run(_ask_all(server, part, num_clients, say))
                _require_idle(server, soak)
                soak.uses.append(server.use())
        soak.health, soak.seconds = health, time.monotonic() - started
        _compare_uses(soak)
        if (slow := float(np.percentile(health.answers, 99))) > slowest_health:
            soak.faults.append(f"/health took {slow:.0f} ms (p99)")
        soak.last_ends = asyncio.run(_end_in_flight(server, soak))
        if "Traceback" in server.errors:
            soak.faults.append(f"the server's log has errors: {server.errors[-3000:]}")
    _judge(replies, soak, say)
    return soak


async def _ask_all(server: ServerProcess, asks: Sequence[Ask], num_clients: int, say: Say) -> list[tuple[Ask, Reply]]:
    found, waiting = [], iter(asks)

    async def be_client(clients: Clients) -> None:
        for ask in waiting:
            found.append((ask, await clients.ask(ask)))
            if len(found) % _REPORT_EVERY == 0:
                say(f"{len(found):,} of {len(asks):,} asks, {server.use()}")

    async with Clients(server.port) as clients, asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(be_client(clients))
    return found


def _require_idle(server: ServerProcess, soak: Soak) -> None:
    """Soon after the last client has left nothing runs, nothing waits, and connections are closed."""
    deadline = time.monotonic() + 10
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while any(left := [server.gauge(name) for name in names]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if any(left):
        soak.faults.append(f"requests are left behind: {left[0]:g} running, {left[1]:g} waiting")
    time.sleep(0.3)


def _compare_uses(soak: Soak) -> None:
    first, last = soak.uses
    for name in ("megabytes", "num_threads", "num_files"):
        before, after = getattr(first, name), getattr(last, name)
        if after - before > getattr(_MOST_GROWTH, name):
            soak.faults.append(f"{name} grow from {before:.0f} to {after:.0f}")


async def _end_in_flight(server: ServerProcess, soak: Soak) -> Counter[str]:
    """SIGTERM while slots and queue are full; how the answers end."""
    ends, count = Counter[str](), NUM_SLOTS + MAX_QUEUE // 2
    num_begun, all_begun = 0, asyncio.Event()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        call = {"messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 400, "ignore_eos": True}
        call |= {"stream": True, "seed": number, "temperature": 1.0}
        nonlocal num_begun
        reason, fault = None, None
        try:
            async with session.post(server.url + CHAT, json=call) as response:
                if response.status != 200:
                    fault = f"status {response.status}"
                num_begun += 1
                if num_begun == count:
                    all_begun.set()
                async for event in read_events(response, 0.0):
                    if "error" in event:
                        reason = f"error: {event['error']['message']}"
                    for choice in event.get("choices", ()):
                        reason = choice["finish_reason"] or reason
        except (aiohttp.ClientError, OSError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        if reason is None:
            fault = fault or "no finish reason"
            soak.faults.append(f"an answer in flight when the server was told to end: {fault}")
        ends[reason or str(fault)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        work = [asyncio.create_task(ask(session, number)) for number in range(count)]
        await asyncio.wait_for(all_begun.wait(), _LONGEST_END)
        server.terminate()
        await asyncio.gather(*work)
    try:
        if code := await asyncio.to_thread(server.wait, _LONGEST_END):
            soak.faults.append(f"told to end, the server ended with exit code {code}: {server.errors[-500:]}")
    except Exception as error:
        soak.faults.append(f"told to end, the server did not: {error}")
    return ends


def _judge(replies: Sequence[tuple[Ask, Reply]], soak: Soak, say: Say) -> None:
    judge = Judge(make_soak_llm())
    for ask, reply in replies:
        soak.ends[reply.end if reply.fault is None else "fault"] += 1
        soak.num_refusals += reply.num_refusals
        if reply.num_known is not None:
            soak.num_turns, soak.num_known = soak.num_turns + 1, soak.num_known + reply.num_known
        fault = reply.fault
        if fault is None and reply.end == "200":
            fault = judge.find_fault(ask, reply)
            soak.num_judged += 1
            if soak.num_judged % _REPORT_EVERY == 0:
                say(f"{soak.num_judged:,} answers judged")
        if fault is not None:
            shown = json.dumps(ask.body.decode(errors="replace"))[:600]
            soak.faults.append(f"ask {ask.number} ({ask.manner}): {fault}\n  {ask.path} {shown}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
