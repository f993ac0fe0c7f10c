"""Where models run, in PyTorch's own words: the only file of this layer that imports PyTorch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from blockpilot.core.config import device_type
from blockpilot.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What all models of an engine share: `EngineConfig`, resolved for this machine and this target."""

    num_slots: int
    context_length: int
    device: torch.device
    dtype: torch.dtype
    linear_backend: str = "plain"
    own_shapes: tuple[int, ...] = ()


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name that `EngineConfig` takes. None: `auto`, whatever suits the target."""
    return None if name == "auto" else getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    if device_type(name) == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but PyTorch sees no GPU here: use the device cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name} was asked for, but PyTorch sees {torch.cuda.device_count()} of them here")
    return device


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU PyTorch has an error of its own, some libraries' and a CPU's are a RuntimeError like any other."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    text = str(error).lower()
    is_told = any(words in text for words in ("out of memory", "allocate memory", "defaultcpuallocator"))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and is_told)


_one_thread = threading.Lock()


@contextmanager
def on_one_thread() -> Iterator[None]:
    """For PyTorch's work on few rows of scores: where the machine is busy, a second thread that waits for a processor
    holds it up forty times longer than it helps."""
    with _one_thread:  # the number is the process's
        num_threads = torch.get_num_threads()
        if num_threads > 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if num_threads > 1:
                torch.set_num_threads(num_threads)
