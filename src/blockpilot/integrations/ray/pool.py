"""Shards in, results out: one actor per device, and a shard whose actor died goes to another one.

What actors send back is put into the run's folder by the process that leads, so that a run looks the same on disk with
and without Ray, and each goes on with what the other began.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from blockpilot import __version__
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.integrations.ray.cluster import Placement

MAX_LOSSES = 3  # of one shard: what kills three workers is not the workers' fault
GOES_ON = "what was done is kept: the same command goes on"
logger = logging.getLogger(__name__)


class Worker:
    """What runs on one device. It loads models at the first call: errors of calls can be told, those in here cannot."""

    def __init__(self, version: str, num_threads: int) -> None:
        self.version, self.num_threads = version, num_threads

    def prepare(self) -> None:
        import torch

        if self.version != __version__:
            raise InputError(f"a worker has BlockPilot {__version__} and this machine {self.version}: install the same")
        torch.set_num_threads(self.num_threads)


class Pool:
    """Actors of one worker class. Use it in a `with` block: they end with it."""

    def __init__(self, worker_class: type[Worker], placements: Sequence[Placement], *arguments: Any) -> None:
        """`arguments` follow the version and the number of threads."""
        shared = [ray.put(argument) for argument in arguments]
        actor: Any = ray.remote(worker_class)
        self.workers = [
            actor.options(
                num_cpus=1 if place.num_gpus else place.num_threads,
                num_gpus=place.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
            ).remote(__version__, place.num_threads, *shared)
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
        """The place of each call and its result, as they come: one call at a time for every worker."""
        waiting, losses = deque(range(len(calls))), Counter[int]()
        idle, running = list(self.workers), dict[Any, tuple[Any, int]]()
        while waiting or running:
            while waiting and idle:
                worker, place = idle.pop(), waiting.popleft()
                running[getattr(worker, method).remote(*calls[place])] = worker, place
            reference = ray.wait(list(running))[0][0]
            worker, place = running.pop(reference)
            try:
                result = ray.get(reference)
            except RayTaskError as error:
                raise _explain(error) from error
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
        reason = " ".join(str(error).split())[:200]
        if not self.workers:
            raise BlockPilotError(f"all workers died ({GOES_ON}), the last one so: {reason}") from error
        if num_losses >= MAX_LOSSES:
            raise BlockPilotError(f"a shard was lost {num_losses} times ({GOES_ON}), last so: {reason}") from error
        logger.warning("a worker died, %d go on: %s", len(self.workers), reason)


def _explain(error: RayTaskError) -> BlockPilotError:
    """What went wrong inside a worker, as a local run would say it."""
    cause = error.cause
    if isinstance(cause, BlockPilotError):
        return cause
    return BlockPilotError(f"a worker failed ({GOES_ON}): {type(cause).__name__}: {cause}")
