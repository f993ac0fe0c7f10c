"""A Ray cluster to work on: a running one, or one of this machine's own that ends with the command.

A device is a GPU, or a whole machine where there is none: one worker each, placed here and not left to Ray, so that
every worker knows how many threads are its own.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from blockpilot.core.errors import BlockPilotError, InputError

LOCAL = "local"  # no address: a cluster of this machine's own
CONNECT_SECONDS = 10.0
QUIET: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}


@dataclass(frozen=True)
class ClusterOptions:
    address: str = LOCAL
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

    is_ours = not ray.is_initialized()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints news of dead workers; our standard output is for results
        if is_ours:
            _init(options.address)
        try:
            limit = torch.get_num_threads() if options.address == LOCAL else None
            yield place_workers(ray.nodes(), options, limit)  # type: ignore[no-untyped-call]
        finally:
            if is_ours:
                ray.shutdown()


def _init(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **QUIET)
        else:
            _check_address(address)
            ray.init(address=address, **QUIET)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError and TimeoutError are kinds of OSError
        reason = " ".join(str(error).split())[:200]
        raise BlockPilotError(f"no Ray cluster at {address}: {reason}") from error


def _check_address(address: str) -> None:
    """Ray itself tries an address that nobody listens to for many minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise InputError(f"--ray {address}: give host:port, or no address to start a cluster on this machine")
    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


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
        threads = max(1, int(alive[node]["CPU"]) // count) if count else 0
        threads = min(threads, max_threads or threads)
        placements += [Placement(node, threads, int(is_gpu))] * count
    return placements
