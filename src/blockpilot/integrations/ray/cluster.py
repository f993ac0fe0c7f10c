"""A Ray cluster to work on, and a pool of workers in it: shards in, results out.

A cluster is a running one, or one of this machine's own that ends with the command. A device is a GPU, or a whole
machine where there is none: one actor each, placed here and not left to Ray, so that every one knows how many threads
are its own. A shard whose actor died goes to another one. What actors send back is put into the run's folder by the
process that leads: a run looks the same on disk with and without Ray, and each goes on with what the other began.
"""

import contextlib
import logging
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from blockpilot import __version__
from blockpilot.core.errors import BlockPilotError, InputError

MAX_LOSSES = 3  # of one shard: what kills three workers is not the workers' fault
_LOCAL = "local"  # no address: a cluster of this machine's own
_CONNECT_SECONDS = 10.0
_GOES_ON = "what was done is kept: the same command goes on"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterOptions:
    address: str = _LOCAL
    device_type: str = "cpu"
    num_workers: int | None = None  # None: one per device


@dataclass(frozen=True)
class Placement:
    """One worker: on which machine, with how much of it."""

    node_id: str
    num_threads: int
    num_gpus: int


@contextlib.contextmanager
def open_cluster(options: ClusterOptions) -> Iterator[list[Placement]]:
    """Connect, or start, and say where the workers belong. A cluster that this process has opened before is used."""
    import torch

    is_ours, address = not ray.is_initialized(), options.address
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints news of dead workers; our standard output is for results
        if is_ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            has_dashboard = False if address == _LOCAL else None  # a running cluster has decided that itself
            try:
                _check_address(address)
                ray.init(address, include_dashboard=has_dashboard, logging_level=logging.ERROR, log_to_driver=False)
            except (OSError, RuntimeError, ValueError) as error:  # ConnectionError and TimeoutError are OSErrors
                raise BlockPilotError(f"no Ray cluster at {address}: {_shorten(error)}") from error
        try:
            limit = torch.get_num_threads() if address == _LOCAL else None
            yield place_workers(ray.nodes(), options, limit)  # type: ignore[no-untyped-call]
        finally:
            if is_ours:
                ray.shutdown()


def _check_address(address: str) -> None:
    """Ray itself tries an address that nobody listens to for many minutes."""
    if address in (_LOCAL, "auto"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise InputError(f"--ray {address}: give host:port, or no address to start a cluster on this machine")
    socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def place_workers(
    nodes: Sequence[Mapping[str, Any]], options: ClusterOptions, max_threads: int | None
) -> list[Placement]:
    """One worker per device, or `num_workers`, spread over the machines; a machine's cores are shared out evenly."""
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")}
    is_gpu = options.device_type == "cuda"
    room = {node: int(has.get("GPU", 0)) if is_gpu else int(has["CPU"]) for node, has in alive.items()}
    wanted = options.num_workers or (sum(room.values()) if is_gpu else len(room))
    if wanted > sum(room.values()) or not wanted:
        what = "GPUs" if is_gpu else "cores"
        raise InputError(f"{max(wanted, 1)} workers need as many {what}, and the Ray cluster has {sum(room.values())}")
    counts = dict.fromkeys(room, 0)
    while sum(counts.values()) < wanted:
        counts[min((node for node in room if counts[node] < room[node]), key=counts.__getitem__)] += 1
    placements = []
    for node, count in counts.items():
        threads = max(1, int(alive[node]["CPU"]) // max(1, count))
        placements += [Placement(node, min(threads, max_threads or threads), int(is_gpu))] * count
    return placements


class Worker:
    """What runs on one device: `make(*arguments)`, and its methods by name.

    It is made at the first call: errors of calls can be told, those in here cannot.
    """

    def __init__(self, version: str, num_threads: int, make: Callable[..., Any], *arguments: Any) -> None:
        self.version, self.num_threads, self.make, self.arguments = version, num_threads, make, arguments

    @cached_property
    def made(self) -> Any:
        import torch

        if self.version != __version__:
            raise InputError(f"a worker has BlockPilot {__version__} and this machine {self.version}: install the same")
        torch.set_num_threads(max(1, self.num_threads))  # one may have no core of its own
        return self.make(*self.arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.made, method)(*arguments)


class Pool:
    """Workers that each make the same object. Use it in a `with` block: they end with it."""

    def __init__(self, make: Callable[..., Any], placements: Sequence[Placement], *arguments: Any) -> None:
        shared = [ray.put(argument) for argument in arguments]
        actor: Any = ray.remote(Worker)
        self.workers = [
            actor.options(
                num_cpus=1 if place.num_gpus else place.num_threads,
                num_gpus=place.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
            ).remote(__version__, place.num_threads, make, *shared)
            for place in placements
        ]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            ray.kill(worker)

    def ask(self, method: str, *arguments: Any) -> Any:
        """One call, by whichever worker lives."""
        return next(self.run(method, [arguments]))[1]

    def run(self, method: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Index and result of each call in the order they finish; every worker has at most one call in flight."""
        waiting, losses = deque(range(len(calls))), Counter[int]()
        idle, running = list(self.workers), dict[Any, tuple[Any, int]]()
        while waiting or running:
            while waiting and idle:
                worker, place = idle.pop(), waiting.popleft()
                running[worker.call.remote(method, *calls[place])] = worker, place
            reference = ray.wait(list(running))[0][0]
            worker, place = running.pop(reference)
            try:
                result = ray.get(reference)
            except RayTaskError as error:  # inside a worker; what we foresee is said as a local run would
                if isinstance(error.cause, BlockPilotError):
                    raise error.cause from error
                reason = f"{type(error.cause).__name__}: {error.cause}"
                raise BlockPilotError(f"a worker failed ({_GOES_ON}): {reason}") from error
            except RayError as error:
                losses[place] += 1
                self._drop(worker, error, num_losses=losses[place])
                waiting.appendleft(place)
                continue
            idle.append(worker)
            yield place, result

    def _drop(self, worker: Any, error: RayError, *, num_losses: int) -> None:
        """A worker is gone. The others take over, unless there are none or its work was lost too often."""
        self.workers.remove(worker)
        ray.kill(worker)  # it may only be out of reach
        reason = _shorten(error)
        if not self.workers:
            raise BlockPilotError(f"all workers died ({_GOES_ON}), the last one so: {reason}") from error
        if num_losses >= MAX_LOSSES:
            raise BlockPilotError(f"a shard was lost {num_losses} times ({_GOES_ON}), last so: {reason}") from error
        logger.warning("a worker died, %d go on: %s", len(self.workers), reason)


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
