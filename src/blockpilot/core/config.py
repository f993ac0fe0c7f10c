"""Settings of one engine, where things are kept, and the only place that reads environment variables."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError, show_value

MAX_BLOCK_SIZE = 64  # anchor + 63 drafted positions
MAX_EAGLE3_BLOCK_SIZE = 16  # every position that EAGLE-3 drafts costs a pass, so long blocks never pay
MAX_TREE_NODES = 128  # drafted nodes checked in one step
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def cache_dir() -> Path:
    """Folder for downloaded models: BLOCKPILOT_CACHE, else XDG_CACHE_HOME/blockpilot, else ~/.cache/blockpilot."""
    if chosen := os.environ.get("BLOCKPILOT_CACHE"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "blockpilot"
    if (home := os.path.expanduser("~")) == "~":  # a user without a home folder, as in containers
        raise InputError("this user has no home folder: set BLOCKPILOT_CACHE to the folder for models")
    return Path(home) / ".cache" / "blockpilot"


def profile_file(name: str, key: Mapping[str, Any]) -> Path:
    """Where step costs are remembered: the file is named after everything that they depend on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-zA-Z0-9.]+", "-", name).strip("-")
    return cache_dir() / "profiles" / f"{slug}-{digest}.json"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def chosen_pilot() -> str | None:
    """The pilot for engines that are started by others, such as vLLM: BLOCKPILOT_PILOT. None: stay out of the way."""
    return os.environ.get("BLOCKPILOT_PILOT", "").strip() or None


def chosen_instructions() -> str | None:
    """Instructions that the compiled CPU kernels shall use instead of the machine's best: BLOCKPILOT_CPU, for tests and
    comparisons. `none`: no compiled kernels."""
    return os.environ.get("BLOCKPILOT_CPU", "").strip() or None


def device_type(name: str) -> str:
    """`cpu` or `cuda`, the devices that there are engines for. A GPU may be named by its number, `cuda:1`, and be
    PyTorch's own object."""
    found = re.fullmatch(r"(cpu|cuda)(:(0|[1-9][0-9]?))?", str(name))
    if found is None:
        raise InputError(f"unknown device {name!r}: use cpu or cuda")
    return found[1]


def default_dtype(device: str) -> str:
    """What models are trained in and run in unless told otherwise."""
    return "bfloat16" if device_type(device) == "cuda" else "float32"


def let_threads_sleep() -> None:
    """Idle worker threads spin for a moment, then sleep. Must run before PyTorch or Numba is imported.

    GNU OpenMP lets them spin for long: beside another busy program they then starve the thread that works, and a pass
    of 25 ms took 1.8 s. With this count it takes 76 ms there and 25 ms alone; threads that sleep at once take 41 ms. A
    setting of the user's own stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "8000")


_BOUNDS = {"num_slots": (1, 4096), "token_budget": (1, 2**20), "context_length": (2, 2**30)}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Bounds of one engine: how many requests at once, how many tokens per forward pass, how long a request may be."""

    device: str = "cpu"
    dtype: str = "auto"  # on a GPU bfloat16; on a CPU int8 for quantized files, else float32
    quantize: str | None = None  # pack a Hugging Face folder to 8 bits, for int8: q8_0
    num_slots: int = 8
    token_budget: int = 512  # prompt tokens prefetched into the cache per pass; long prompts go in chunks of this size
    context_length: int | None = None  # None: the target's own limit
    reuses_prefixes: bool = False  # prompts that begin as an earlier text did are read from there on
    own_shapes: tuple[int, ...] = ()  # block sizes that a GPU drafts and checks as they are, not rounded up to a bucket
    linear_backend: str = "auto"  # how float32 weights are packed on a CPU: auto, mkldnn, plain

    def __post_init__(self) -> None:
        device_type(self.device)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if name == "context_length" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name} must be a whole number, got {show_value(value)}")
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise InputError(f"{name} must be {bound}, got {show_value(value)}")
        if any(not 2 <= size <= MAX_BLOCK_SIZE for size in self.own_shapes):
            raise InputError(f"own_shapes are block sizes between 2 and {MAX_BLOCK_SIZE}, got {self.own_shapes}")
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}: use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        if device_type(self.device) == "cuda" and self.dtype == "auto":
            object.__setattr__(self, "dtype", default_dtype(self.device))
        if device_type(self.device) == "cuda" and self.dtype == "int8":
            raise InputError("dtype int8 runs on a CPU: use bfloat16 on a GPU")
