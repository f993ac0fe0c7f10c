"""The compiled kernels for CPUs: which of them this machine runs, and their data as Python lays it out.

`hatch_build.py` compiles `kernels/` once for every set of instructions. The best that this machine has is loaded when
it is first asked for; BLOCKPILOT_CPU names another one. Where no library lies beside this file, there are no kernels:
float32 serves.
"""

import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from blockpilot.core.config import chosen_instructions
from blockpilot.core.errors import BlockPilotError, InputError

FOLDER = Path(__file__).parent / "lib"
# best first, with the bit that `bp_find_features` sets; the last runs everywhere
INSTRUCTIONS = {
    "x86_64": {"avx512-vnni": 4, "avx-vnni": 2, "avx2": 1, "portable": 0},
    "aarch64": {"arm-dot": 1, "portable": 0},
}
MAX_DIM = 256  # of a head
MAX_LAYERS = 200  # stages of a pass are counted beforehand
MAX_RANKED, MAX_ASKED = 64, 64  # candidates of a position; queries that attend together
SPINS = 100_000  # how long an idle thread spins, a millisecond or two; then it sleeps


class WeightData(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("size", c_int32),
        ("kind", c_int32),
        ("is_half", c_int32),
        ("stride", c_int32),
        ("data", c_void_p),
    ]


class LayerData(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("qkv", WeightData * 3),
        ("gate_up", WeightData * 2),
        ("o", WeightData),
        ("down", WeightData),
        ("num_qkv", c_int32),
        ("qkv_bias", c_void_p),
        ("router", c_void_p),
        ("expert_gate_up", POINTER(WeightData)),
        ("expert_down", POINTER(WeightData)),
        ("attention_base", c_void_p),
        ("mlp_base", c_void_p),
        ("attention_kernel", WeightData),
        ("mlp_kernel", WeightData),
    ]


class ModelData(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv", "dim", "inner")),
        *((name, c_int32) for name in ("num_experts", "num_active", "is_normalized", "conv_taps", "conv_group")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("cosines", "sines", "norm")),
        ("layers", POINTER(LayerData)),
    ]


class CacheData(Structure):
    _fields_ = [
        ("rows", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "plane_stride", "slot_stride", "head_stride")),
    ]


class BatchData(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("count", "num_rows", "num_runs", "run_size")),
        ("runs", c_void_p),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "stored", "num_placed", "num_keys")),
        *((name, c_void_p) for name in ("list_starts", "lists", "offsets", "embedding", "tap_places", "taps")),
        ("num_taps", c_int32),
    ]


class WantedData(Structure):
    _fields_ = [
        ("count", c_int32),
        ("rows", c_void_p),
        ("head", POINTER(WeightData)),
        *((name, c_void_p) for name in ("temperatures", "seeds", "places", "hidden", "logits", "best")),
    ]


class RankingData(Structure):
    _fields_ = [
        ("num_best", c_int32),
        *((name, c_void_p) for name in ("token_ids", "depths", "anchor_ids")),
        ("rank", c_int32),
        *((name, c_void_p) for name in ("parents", "children")),
        ("projection", POINTER(WeightData)),
        *((name, c_void_p) for name in ("best_ids", "log_probs", "pairs", "normed", "scores", "values", "gates")),
    ]


class ShownData(Structure):
    _fields_ = [
        ("count", c_int32),
        ("size", c_int32),
        ("taps", c_void_p),
        ("features", POINTER(WeightData)),
        ("norm", c_void_p),
        ("projection", POINTER(WeightData)),
        *((name, c_void_p) for name in ("rows", "positions", "slots", "stored")),
    ]


def address(array: Any) -> int | None:
    """Where a NumPy array or a tensor lies; None for None. Whoever asks keeps it alive."""
    if array is None:
        return None
    found: int = array.data_ptr() if hasattr(array, "data_ptr") else array.__array_interface__["data"][0]
    return found


def find_instructions() -> str | None:
    """What this machine is best served with, or what was asked for. None: no library was built for it."""
    known = _known()
    libraries = [name for name in known if _path(name).is_file()]
    chosen = chosen_instructions()
    if chosen == "none" or "portable" not in libraries:
        return None
    features = _load(_path("portable")).bp_find_features()
    runnable = [name for name in libraries if known[name] & features == known[name]]
    if chosen is None:
        return runnable[0]
    if chosen not in runnable:
        raise InputError(f"BLOCKPILOT_CPU is {chosen!r}, and this machine runs {', '.join(runnable)} or none")
    return chosen


def _known() -> dict[str, int]:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    return INSTRUCTIONS.get(machine, {})


def _path(name: str) -> Path:
    return FOLDER / f"kernels-{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"


@functools.cache
def _load(path: Path) -> Any:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BlockPilotError(f"{path} cannot be loaded ({error}); install BlockPilot again") from error
    for name, kind in (("instructions", c_char_p), ("open_pool", c_void_p), ("open_space", c_void_p)):
        getattr(library, f"bp_{name}").restype = kind
    library.bp_open_pool.argtypes = [c_int, c_int]
    library.bp_close_space.argtypes = [c_void_p]
    library.bp_forward.argtypes = [c_void_p] * 7
    library.bp_multiply.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_int]
    library.bp_show.argtypes = [c_void_p] * 4
    library.bp_move.argtypes = [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]
    library.bp_pack.argtypes = [c_void_p] * 7
    return library


class Kernels:
    """One set of instructions and a pool of threads; calls take turns, from whichever thread they come."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name, self.num_threads = name, num_threads
        self._library = _load(_path(name))
        self._pool = self._library.bp_open_pool(num_threads, SPINS)
        self._turn = threading.Lock()
        self.arena: Any = None  # of weights (native/weights.py)
        if not self._pool:
            raise BlockPilotError("not enough memory for a pool of threads")

    def multiply(self, weight: WeightData, x: int, out: int, count: int) -> None:
        self._run(self._library.bp_multiply, ctypes.byref(weight), x, out, count)

    def forward(
        self,
        space: "Space",
        model: ModelData,
        cache: CacheData,
        batch: BatchData,
        wanted: WantedData,
        ranking: RankingData | None = None,
    ) -> None:
        given = (ctypes.byref(part) for part in (model, cache, batch, wanted))
        self._run(self._library.bp_forward, space.handle, *given, ranking and ctypes.byref(ranking))

    def show(self, model: ModelData, cache: CacheData, shown: ShownData) -> None:
        self._run(self._library.bp_show, *(ctypes.byref(part) for part in (model, cache, shown)))

    def move(self, model: ModelData, cache: CacheData, slot: int, start: int, path: Sequence[int]) -> None:
        """Rows of an ascending path behind `start` to where they belong."""
        places = (c_int32 * len(path))(*path)
        self._run(self._library.bp_move, ctypes.byref(model), ctypes.byref(cache), slot, start, len(path), places)

    def pack(
        self, weight: WeightData, codes: int, scales: int | None, offsets: int | None, steps: int | None, to: int
    ) -> None:
        with self._turn:
            self._library.bp_pack(self._pool, ctypes.byref(weight), codes, scales, offsets, steps, to)

    def open_space(self) -> "Space":
        return Space(self._library)

    def _run(self, function: Any, *given: Any) -> None:
        with self._turn:
            failed = function(self._pool, *given)
        if failed:
            raise MemoryError("not enough memory for a pass of this size")


class Space:
    """Memory of passes; it grows with the number of tokens of the largest."""

    def __init__(self, library: Any) -> None:
        self._library, self.handle = library, library.bp_open_space()

    def __del__(self) -> None:
        if self.handle:
            self._library.bp_close_space(self.handle)


@functools.cache
def _shared(name: str, num_threads: int, process: int) -> Kernels:
    return Kernels(name, num_threads)


def open_kernels(num_threads: int) -> Kernels | None:
    """The machine's kernels, whose threads all models of a process share. None: there are none."""
    name = find_instructions()
    return None if name is None else _shared(name, num_threads, os.getpid())  # a fork has no threads
