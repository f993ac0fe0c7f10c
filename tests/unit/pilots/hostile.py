"""Pilot folders and profiles that no honest run writes. A damage is named by the word that its error must hold."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

Arrays = dict[str, np.ndarray]


def change_card(folder: Path, **changes: object) -> None:
    path = folder / "pilot.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_arrays(folder: Path, change: Callable[[Arrays], bytes]) -> None:
    """Other arrays, and a card that knows their checksum."""
    data = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").write_bytes(data)
    change_card(folder, sha256=hashlib.sha256(data).hexdigest())


def _set(name: str, value: np.ndarray) -> Callable[[Arrays], bytes]:
    return lambda arrays: save(arrays | {name: value})


def _drop(name: str) -> Callable[[Arrays], bytes]:
    return lambda arrays: save({other: array for other, array in arrays.items() if other != name})


BAD_ARRAYS: dict[str, Callable[[Arrays], bytes]] = {
    "calibration without depths": _set("calibration", np.zeros((0, 6), np.float32)),
    "calibration of other features": _set("calibration", np.zeros((3, 5), np.float32)),
    "calibration without axes": _set("calibration", np.zeros((), np.float32)),
    "calibration deeper than any block": _set("calibration", np.zeros((64, 6), np.float32)),
    "calibration of whole numbers": _set("calibration", np.zeros((3, 6), np.int32)),
    "calibration of halves": _set("calibration", np.zeros((3, 6), np.float16)),
    "calibration without numbers": _set("calibration", np.full((3, 6), np.nan, np.float32)),
    "calibration without bounds": _set("calibration", np.full((3, 6), 1e30, np.float32)),
    "sampled_calibration of other features": _set("sampled_calibration", np.zeros((3, 7), np.float32)),
    "tree_forecast of other sizes": _set("tree_forecast", np.zeros((3, 3, 10, 5), np.float32)),
    "tree_forecast of too many nodes": _set("tree_forecast", np.zeros((2, 3, 500, 5), np.float32)),
    "tree_forecast that is flat": _set("tree_forecast", np.zeros((30,), np.float32)),
    "magic": _set("magic", np.zeros(3, np.float32)),
    "missing": _drop("calibration"),
    "damaged by an unknown kind": lambda arrays: save(arrays).replace(b'"F32"', b'"F99"', 1),
    "damaged by cutting": lambda arrays: save(arrays)[:-9],
    "damaged by zeros": lambda arrays: bytes(1000),
    "damaged by a header without an end": lambda arrays: b"\xff" * 8 + save(arrays)[8:],
    "larger than any pilot": _set("magic", np.zeros(1 << 23, np.float32)),
}

BAD_PROFILES: dict[str, object] = {
    "no object": [],
    "nothing": {},
    "text for a number": {"verify": [{"tokens": "1", "ms": 1.0}]},
    "no tokens": {"verify": [{"tokens": 0, "ms": 1.0}]},
    "negative time": {"verify": [{"tokens": 1, "ms": -1.0}]},
    "endless time": {"overhead_ms": 1e300},
    "too many tokens": {"verify": [{"tokens": 2**21, "ms": 1.0}]},
    "too many requests": {"verify": [{"tokens": 1, "ms": 1.0, "batch_size": 2**21}]},
    "too many points": {"verify": [{"tokens": 1, "ms": 1.0}] * 5000},
    "padding that falls": {"padding": [4, 1]},
    "padding of nothing": {"padding": [0]},
    "a nested key": {"key": {"target": [1]}},
    "an unknown field": {"a\nb": 1},
}
