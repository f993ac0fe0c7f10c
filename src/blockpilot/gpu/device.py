"""What a GPU offers: graphs of kernels, clocks, memory."""

import gc
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from blockpilot.core.errors import InputError

logger = logging.getLogger(__name__)
MAX_HEAD_DIM = 256
MAX_SHARED_ROW = 512  # bytes of a head that 99 KB of shared memory are enough for
WARM_UPS = 2  # kernels are compiled and libraries choose their algorithms before anything is recorded


def has_triton() -> bool:
    """Triton comes with PyTorch's CUDA builds on Linux; without it slower paths serve."""
    return importlib.util.find_spec("triton") is not None


def can_fuse(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether passes run fused; where a GPU cannot, one line says why and the plain path serves, which is not exact."""
    if device.type != "cuda":
        return False
    if not has_triton():
        _warn_once(
            "Triton is not installed: the GPU runs several times slower, and its text may part from plain decoding at "
            "near-ties; install it with `pip install triton`"
        )
        return False
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        _warn_once(
            f"heads of size {head_dim} are not fused (even sizes up to {MAX_HEAD_DIM} are): the GPU runs slower, and "
            "its text may part from plain decoding at near-ties"
        )
        return False
    if head_dim * dtype.itemsize > MAX_SHARED_ROW and not has_large_memory(device):
        _warn_once(
            f"this GPU does not fuse heads of size {head_dim} in {dtype}: choose bfloat16, or it runs slower and its "
            "text may part from plain decoding at near-ties"
        )
        return False
    return True


@cache
def has_large_memory(device: torch.device) -> bool:
    """Whether a processor shares 227 KB, as those of data centres do from Hopper on; others have 99."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are compiled, recorded, launched and waited for on the current device: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capture(run: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """`run` as one CUDA graph. It reads from and writes to buffers that stay."""
    if device.type != "cuda":
        return run
    with on_device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        return _Graph(run, pool, stream)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs and their owners refer to each other, so that garbage collection alone frees them. If it did so while
    another graph is recorded, the recording could fail, or the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Graph:
    """A recorded function. It keeps the function, and with it every tensor that the recording reads."""

    def __init__(self, run: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> None:
        """By default PyTorch records on one stream for the whole process, whatever its device is."""
        self._run = run
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph, pool=pool, stream=stream):
            run()

    def __call__(self) -> None:
        self._graph.replay()


def graph_pool(device: torch.device) -> Any:
    """Memory that the graphs of one owner share: they never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Stopwatch:
    """When a device comes by marks between passes, without waiting for it at more than one of them."""

    def __init__(self, device: torch.device, num_marks: int = 4) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_marks)] if device.type == "cuda" else []
        self._times = [0.0] * num_marks
        self.last = num_marks - 1

    def mark(self, index: int) -> None:
        if self._events:
            self._events[index].record()
        else:
            self._times[index] = time.perf_counter()

    def wait(self, index: int) -> None:
        if self._events:
            self._events[index].synchronize()

    def seconds(self) -> list[float]:
        """Between each mark and the next. All must have been waited for."""
        if self._events:
            return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._times)]


def check_memory(device: torch.device, num_bytes: int, what: str) -> None:
    """Refuse before anything is allocated."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise InputError(
            f"{what} needs {num_bytes / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB free: "
            "lower the number of slots or the context length, or choose bfloat16"
        )


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
