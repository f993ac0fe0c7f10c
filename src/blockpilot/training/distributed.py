"""Several processes train one drafter: torchrun starts them, each has a GPU, gradients are averaged once per step."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The processes of one run; a group of one never communicates."""

    rank: int = 0
    size: int = 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of `value` over all processes."""
        if self.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """One collective for everything: gradients travel as a single flat tensor."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.mean(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def any(self, is_true: bool, device: torch.device) -> bool:
        """True for all as soon as it is true for one; waits for the device."""
        return bool(self.mean(torch.tensor(float(is_true), device=device)) > 0) if self.size > 1 else is_true


def own_device(name: str) -> torch.device:
    """`cuda` is this process's own GPU: torchrun says which in LOCAL_RANK."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if name == "cuda" else torch.device(name)


@contextmanager
def join_group(device: torch.device) -> Iterator[Group]:
    """The group torchrun prepared, or a group of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Group()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Its functions have the group of the time of their import as a default value. An optimizer imports it, and a group
    # that lives on after `destroy_process_group` has threads that end the interpreter by SIGABRT, sometimes.
    import_module("torch.distributed.nn")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
