"""Where workers go, from what Ray says of its machines, and what is refused."""

from typing import Any

import pytest

from blockpilot.core.errors import InputError
from blockpilot.integrations.ray.cluster import ClusterOptions, open_cluster, place_workers


def node(name: str, cpus: int, gpus: int = 0, *, is_alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": is_alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


def place(nodes: list[dict[str, Any]], *, limit: int | None = None, **options: Any) -> list[tuple[str, int, int]]:
    found = place_workers(nodes, ClusterOptions(**options), limit)
    return [(one.node_id, one.num_threads, one.num_gpus) for one in found]


def test_one_worker_per_device() -> None:
    nodes = [node("a", 8, 2), node("b", 4, 1), node("c", 16), node("gone", 8, 8, is_alive=False), node("head", 0)]
    assert place(nodes, device_type="cuda") == [("a", 4, 1), ("a", 4, 1), ("b", 4, 1)]
    assert place(nodes) == [("a", 8, 0), ("b", 4, 0), ("c", 16, 0)]


def test_more_or_fewer_workers_are_spread_and_share_the_cores() -> None:
    nodes = [node("a", 8, 4), node("b", 4, 1)]
    assert place(nodes, num_workers=3) == [("a", 4, 0), ("a", 4, 0), ("b", 4, 0)]
    assert place(nodes, num_workers=1) == [("a", 8, 0)]
    assert place(nodes, num_workers=2, limit=3) == [("a", 3, 0), ("b", 3, 0)]
    assert place(nodes, device_type="cuda", num_workers=4) == [("a", 2, 1)] * 3 + [("b", 4, 1)]
    with pytest.raises(InputError, match="6 workers need as many GPUs, and the Ray cluster has 5"):
        place(nodes, device_type="cuda", num_workers=6)
    with pytest.raises(InputError, match="1 workers need as many GPUs, and the Ray cluster has 0"):
        place([node("a", 8)], device_type="cuda")


def test_an_address_must_look_like_one() -> None:
    with pytest.raises(InputError, match="give host:port"), open_cluster(ClusterOptions(address="somewhere")):
        pass
