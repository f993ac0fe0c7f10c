"""A pilot as a folder: `pilot.json` says what it is, `model.safetensors` holds its arrays.

`pilot.json` is written last and carries the checksum of the arrays, so a folder that was left half-written is noticed.
Step costs are not part of a pilot: they belong to the machine that runs it.
"""

import hashlib
import json
import os.path
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, read_bytes, write_bytes, write_text
from blockpilot.core.manifests import MODEL, PILOT, find_content, require_content
from blockpilot.core.reading import convert, read_json
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.calibration import FEATURES, Calibration
from blockpilot.pilots.cost_model import CostSource, StepCosts
from blockpilot.pilots.forecast import FEATURES as REMEMBERED
from blockpilot.pilots.forecast import NUM_LEVELS, Forecast
from blockpilot.pilots.step import StepPilot

if TYPE_CHECKING:
    from blockpilot.pilots.prefill import PrefillPilot

_CARD, _ARRAYS = "pilot.json", "model.safetensors"
_SCHEMA_VERSION = 1
KINDS = ("step", "prefill")
BlockSize = Annotated[int, msgspec.Meta(ge=2, le=MAX_BLOCK_SIZE)]
SAMPLED = "sampled_calibration"  # the array for temperatures above 0
_FORECASTS = ("tree_forecast", "chain_forecast")  # their arrays, by `is_chain`
_SAMPLED_FORECASTS = ("sampled_tree_forecast", "sampled_chain_forecast")  # and for temperatures above 0
_MAX_CARD_BYTES = 16 * MEGABYTE
_MAX_BYTES = 2**32  # the paper's network for a large vocabulary has gigabytes
_MAX_STEP_BYTES = 16 * MEGABYTE
_MAX_WEIGHT = 1e6
Arrays = dict[str, Any]
Axes = Mapping[str, tuple[Container[int], ...]]  # of every array the lengths that each of its axes may have


@dataclass(frozen=True, kw_only=True)
class PilotCard:
    """The content of `pilot.json`."""

    kind: str  # step (trees and chains) or prefill
    target: str  # what it was fitted for
    drafter: str
    sizes: Annotated[tuple[BlockSize, ...], msgspec.Meta(min_length=1)]  # block sizes it may ask the drafter for
    config: Mapping[str, Any]
    training: Mapping[str, Any]  # facts about the fit, for people
    sha256: str
    schema_version: int = _SCHEMA_VERSION


def save_pilot(
    folder: Path,
    pilots: "Sequence[StepPilot] | PrefillPilot",
    *,
    target: str,
    drafter: str,
    training: Mapping[str, Any],
) -> None:
    """Write one prefill pilot, or step pilots (a tree, a chain or both) that share calibration and draft sizes."""
    pair = {"target": target, "drafter": drafter, "training": training}
    if not isinstance(pilots, Sequence):
        config = asdict(pilots.network.config)
        state = {name: tensor.detach().cpu().float().numpy() for name, tensor in pilots.network.state_dict().items()}
        _write(folder, state, pair | {"kind": "prefill", "sizes": config.pop("sizes"), "config": config})
        return
    if len({(pilot.draft_sizes, id(pilot.calibration)) for pilot in pilots}) != 1:
        raise InputError("step pilots in one folder share their calibration and draft sizes")
    arrays = {"calibration": pilots[0].calibration.weights}
    if pilots[0].sampled is not None:
        arrays[SAMPLED] = pilots[0].sampled.weights
    for pilot in pilots:
        for names, forecast in ((_FORECASTS, pilot.forecast), (_SAMPLED_FORECASTS, pilot.sampled_forecast)):
            if forecast is not None and forecast.weights is not None:
                arrays[names[pilot.is_chain]] = forecast.weights
    _write(folder, arrays, pair | {"kind": "step", "sizes": pilots[0].draft_sizes, "config": {}})


def load_pilot_folder(
    folder: Path,
    costs: Callable[[], CostSource] = StepCosts.linear,
    *,
    is_chain: bool = False,
    max_block_size: int | None = None,
    name: str = "",
) -> Pilot:
    """The pilot in a folder, for a drafter that can do blocks up to `max_block_size`.

    `costs` is called only if the pilot weighs steps. Without it an imagined load is assumed.
    """
    card = read_card(folder)
    if max_block_size is not None and max(card.sizes) > max_block_size:
        raise InputError(
            f"{folder}: the pilot asks for block sizes up to {max(card.sizes)} ({card.drafter}), and this drafter "
            f"can do {max_block_size} at most"
        )
    if card.kind == "prefill":
        return _build_prefill(folder, card, costs, name)
    return _build_step(folder, card, costs(), is_chain=is_chain, name=name)


def read_card(folder: Path) -> PilotCard:
    path = folder / _CARD
    if (values := read_json(path, most=_MAX_CARD_BYTES)) is None:
        require_content(folder, PILOT)
        raise InputError(f"{folder} is no pilot folder: {path.name}: No such file or directory")
    if (version := values.get("schema_version")) != _SCHEMA_VERSION:
        raise InputError(f"{path} has schema_version {version!r:.40}, and this package reads {_SCHEMA_VERSION}")
    if difference := {field.name for field in fields(PilotCard)} ^ set(values):
        raise InputError(f"{path}: field {sorted(difference)[0]!r:.40} is unknown or missing")
    card: PilotCard = convert(values, PilotCard, str(path))
    if card.kind not in KINDS:
        raise InputError(f"{path}: kind {card.kind!r:.40} is unknown; known: {', '.join(KINDS)}")
    if any(size >= larger for size, larger in pairwise(card.sizes)):
        raise InputError(f"{path}: the block sizes {card.sizes} do not rise")
    return card


def _write(folder: Path, arrays: Arrays, card: Mapping[str, Any]) -> None:
    if find_content(folder) == MODEL:  # its weights have the same name
        raise InputError(f"{folder} holds a model, no pilot: choose another --out")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise InputError("the fit gave weights that are no numbers: the traces hold scores that no drafter gives")
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    write_bytes(folder / _ARRAYS, data)
    values = asdict(PilotCard(**card, sha256=hashlib.sha256(data).hexdigest()))
    write_text(folder / _CARD, json.dumps(values, indent=1) + "\n")


def _build_step(folder: Path, card: PilotCard, costs: CostSource, *, is_chain: bool, name: str) -> StepPilot:
    depths, sizes, nodes = range(1, MAX_BLOCK_SIZE), (len(card.sizes),), range(1, MAX_TREE_NODES + 1)
    calibration: tuple[Container[int], ...] = (depths, (len(FEATURES),))
    forecasts: tuple[Container[int], ...] = (sizes, (NUM_LEVELS,), nodes, (len(REMEMBERED),))
    names = *_FORECASTS, *_SAMPLED_FORECASTS
    axes = {"calibration": calibration, SAMPLED: calibration, **dict.fromkeys(names, forecasts)}
    arrays = _read_arrays(folder, card, axes, optional=(SAMPLED, *names), most=_MAX_STEP_BYTES)
    calibrations = {name: Calibration(arrays[name]) for name in ("calibration", SAMPLED) if name in arrays}
    fitted = [arrays.get(names[is_chain]) for names in (_FORECASTS, _SAMPLED_FORECASTS)]
    greedy, sampled = (None if one is None else Forecast(card.sizes, is_chain, one.shape[-2], one) for one in fitted)
    return StepPilot(
        calibrations["calibration"],
        costs,
        is_chain=is_chain,
        draft_sizes=card.sizes,
        forecast=greedy,
        sampled=calibrations.get(SAMPLED),
        sampled_forecast=sampled,
        label=name,
        reads_copies=not is_chain,
    )


def _build_prefill(folder: Path, card: PilotCard, costs: Callable[[], CostSource], name: str) -> "PrefillPilot":
    """The network is laid out without memory first: a card may ask for more than its arrays hold."""
    import torch

    from blockpilot.pilots.prefill import PrefillNetwork, PrefillPilot, read_config

    config = read_config({**card.config, "sizes": card.sizes}, f"{folder / _CARD}: config")
    with torch.device("meta"):
        network = PrefillNetwork(config)
    axes = {key: tuple((length,) for length in tensor.shape) for key, tensor in network.state_dict().items()}
    num_bytes = sum(4 * tensor.numel() for tensor in network.state_dict().values())
    arrays = _read_arrays(folder, card, axes, most=min(num_bytes + MEGABYTE, _MAX_BYTES))
    network.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, assign=True)
    return PrefillPilot(network, costs() if config.objective == "tau" else None, name or "prefill")


def _read_arrays(folder: Path, card: PilotCard, axes: Axes, *, most: int, optional: Collection[str] = ()) -> Arrays:
    """Arrays of exactly these names, whose lengths lie within `axes`, in a file of at most `most` bytes."""
    path = folder / _ARRAYS
    if not os.path.isfile(path):
        raise InputError(f"{folder} is no complete pilot folder: {path.name} is missing")
    data = read_bytes(path, min(most, os.path.getsize(path)))  # a read takes as much memory as it may bring
    if (digest := hashlib.sha256(data).hexdigest()) != card.sha256:
        raise InputError(f"{path} has the checksum {digest[:12]}..., and pilot.json names {card.sha256:.12}...")
    try:
        arrays: Arrays = load(data)
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: numbers of a kind that NumPy does not know
        raise InputError(f"{path} is damaged: {error}") from error
    if odd := sorted((axes.keys() ^ arrays.keys()) - (set(optional) - arrays.keys())):
        state = "left over" if odd[0] in arrays else "missing"
        raise InputError(f"{path} does not fit together with pilot.json: the array {odd[0]!r:.80} is {state}")
    for name, array in arrays.items():
        _check_array(path, name, array, axes[name])
    return arrays


def _check_array(path: Path, name: str, array: NDArray[Any], axes: Sequence[Container[int]]) -> None:
    if len(array.shape) != len(axes) or not all(length in axis for length, axis in zip(array.shape, axes, strict=True)):
        raise InputError(f"{path} does not fit together with pilot.json: {name} has the shape {array.shape}")
    if array.dtype != np.float32:
        raise InputError(f"{path}: {name} holds {array.dtype}, not float32")
    if not np.isfinite(array).all() or np.abs(array).max() > _MAX_WEIGHT:
        raise InputError(f"{path}: {name} holds numbers that are not finite, or beyond {_MAX_WEIGHT:.0e}")
