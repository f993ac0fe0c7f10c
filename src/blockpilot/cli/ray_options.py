"""`--ray` and `--ray-workers`, which `collect` and `bench` share."""

import argparse
import importlib.util
from typing import TYPE_CHECKING

from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.integrations.ray.cluster import ClusterOptions

LOCAL = "local"


def add_ray_arguments(group: argparse._ArgumentGroup) -> None:
    ray_help = "work on a Ray cluster: host:port of a running one, or no address to start one on this machine"
    group.add_argument("--ray", nargs="?", const=LOCAL, metavar="ADDRESS", help=ray_help)
    workers_help = "default: one per GPU, without GPUs one per machine"
    group.add_argument("--ray-workers", type=int, metavar="N", help=workers_help)


def check_ray(arguments: argparse.Namespace) -> None:
    """What can be wrong with these options, before anything is loaded."""
    if arguments.ray is None:
        if arguments.ray_workers is not None:
            raise InputError("--ray-workers is the number of workers on a Ray cluster: give --ray as well")
        return
    if arguments.ray_workers is not None and arguments.ray_workers < 1:
        raise InputError(f"--ray-workers must be at least 1, got {arguments.ray_workers}")
    if ":" in arguments.device:
        raise InputError(f"--ray gives every worker a GPU of its own: use --device cuda, not {arguments.device}")
    if importlib.util.find_spec("ray") is None:
        raise InputError("--ray needs the package ray: pip install 'blockpilot[ray]'")


def cluster_options(arguments: argparse.Namespace) -> "ClusterOptions":
    from blockpilot.integrations.ray.cluster import ClusterOptions

    device_type = "cuda" if arguments.device.startswith("cuda") else "cpu"
    return ClusterOptions(address=arguments.ray, device_type=device_type, num_workers=arguments.ray_workers)
