"""A pilot as a folder: `pilot.json` says what it is, `model.safetensors` holds its arrays.

`pilot.json` is written last and carries the checksum of the arrays, so a folder that was left half-written is noticed.
Step costs are not part of a pilot: they belong to the machine that runs it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, hash_file, read_json, write_text
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.calibration import FEATURES, Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.forecast import Forecast
from blockpilot.pilots.step import StepPilot

if TYPE_CHECKING:
    from blockpilot.pilots.prefill import PrefillPilot

_SCHEMA_VERSION = 1
KINDS = ("step", "prefill")
SAMPLED = "sampled_calibration"  # the array for temperatures above 0
_FORECASTS = ("tree_forecast", "chain_forecast")  # their arrays, by `is_chain`
Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PilotCard:
    """The content of `pilot.json`."""

    kind: str  # step (trees and chains) or prefill
    target: str  # what it was fitted for
    drafter: str
    sizes: tuple[int, ...]  # block sizes it may ask the drafter for
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
        if pilot.forecast is not None and pilot.forecast.weights is not None:
            arrays[_FORECASTS[pilot.is_chain]] = pilot.forecast.weights
    _write(folder, arrays, pair | {"kind": "step", "sizes": pilots[0].draft_sizes, "config": {}})


def load_pilot_folder(
    folder: Path,
    costs: Callable[[], StepCosts] = StepCosts.linear,
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
    arrays = _read_arrays(folder, card)
    try:
        if card.kind == "prefill":
            return _build_prefill(card, arrays, costs, name)
        return _build_step(card, arrays, costs(), is_chain=is_chain, name=name)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder}: pilot.json and model.safetensors do not fit together: {error}") from error


def read_card(folder: Path) -> PilotCard:
    path = folder / "pilot.json"
    if (values := read_json(path)) is None:
        raise InputError(f"{folder} is no pilot folder: {path.name}: No such file or directory")
    if (version := values.get("schema_version")) != _SCHEMA_VERSION:
        raise InputError(f"{path} has schema_version {version!r}, and this package reads {_SCHEMA_VERSION}")
    if difference := {field.name for field in fields(PilotCard)} ^ set(values):
        raise InputError(f"{path}: field {sorted(difference)[0]!r} is unknown or missing")
    sizes = values["sizes"]
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"{path}: sizes {sizes!r} are no block sizes")
    if values["kind"] not in KINDS:
        raise InputError(f"{path}: kind {values['kind']!r} is unknown; known: {', '.join(KINDS)}")
    return PilotCard(**values | {"sizes": tuple(sizes)})


def _write(folder: Path, arrays: Arrays, card: Mapping[str, Any]) -> None:
    weights = folder / "model.safetensors"
    with atomic_path(weights) as temporary:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
        digest = hash_file(temporary)
    values = asdict(PilotCard(**card, sha256=digest))
    write_text(folder / "pilot.json", json.dumps(values, indent=1) + "\n")


def _read_arrays(folder: Path, card: PilotCard) -> Arrays:
    path = folder / "model.safetensors"
    try:
        digest, arrays = hash_file(path), load_file(path)
    except OSError as error:
        raise InputError(f"{folder} is no complete pilot folder: {path.name}: {error.strerror}") from error
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if digest != card.sha256:
        raise InputError(f"{path} has the checksum {digest[:12]}..., and pilot.json names {card.sha256[:12]}...")
    return arrays


def _build_step(card: PilotCard, arrays: Arrays, costs: StepCosts, *, is_chain: bool, name: str) -> StepPilot:
    calibrations = {name: Calibration(arrays[name]) for name in ("calibration", SAMPLED) if name in arrays}
    for weights in (calibration.weights for calibration in calibrations.values()):
        if weights.ndim != 2 or weights.shape[1] != len(FEATURES):
            raise ValueError(f"a calibration has the shape {weights.shape}, and [depths, {len(FEATURES)}] is needed")
    fitted = arrays.get(_FORECASTS[is_chain])
    forecast = None if fitted is None else Forecast(card.sizes, is_chain, fitted.shape[-2], fitted)
    return StepPilot(
        calibrations["calibration"],
        costs,
        is_chain=is_chain,
        draft_sizes=card.sizes,
        forecast=forecast,
        sampled=calibrations.get(SAMPLED),
        label=name,
    )


def _build_prefill(card: PilotCard, arrays: Arrays, costs: Callable[[], StepCosts], name: str) -> "PrefillPilot":
    import torch

    from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot

    network = PrefillNetwork(PrefillConfig(sizes=card.sizes, **card.config))
    network.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()})
    return PrefillPilot(network, costs() if network.config.objective == "tau" else None, name or "prefill")
