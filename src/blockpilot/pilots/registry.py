"""From the text of `--pilot` to a pilot."""

import os.path
from collections.abc import Callable
from pathlib import Path

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import CostSource, StepCosts
from blockpilot.pilots.files import load_pilot_folder, read_card
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot
from blockpilot.pilots.step import StepPilot

KNOWN = (
    f"ar, fixed:B (B from 1 to {MAX_BLOCK_SIZE}), tree:N or tree:N@B (N nodes, N to {MAX_TREE_NODES}), step, "
    "chain-step, prefill:PATH, auto, or the path of a pilot folder"
)
_MAX_DIGITS = 4
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def load_pilot(
    spec: str,
    *,
    has_drafter: bool = True,
    target: str = "",
    drafter: str = "",
    max_block_size: int | None = None,
    costs: Callable[[], CostSource] = StepCosts.linear,
) -> Pilot:
    """A pilot by name, for a pair of target and drafter.

    `costs` is called only by pilots that weigh steps; without it they assume a load that makes wide checks cheap.
    """
    kind, _, argument = spec.partition(":")
    is_chain = spec == "chain-step"
    if spec == "ar" or (spec == "auto" and not has_drafter):
        return PlainPilot()
    if kind == "fixed":
        size = _parse_size(spec, argument, MAX_BLOCK_SIZE)
        return FixedPilot(size) if size > 1 else PlainPilot()
    if kind == "tree":
        nodes, _, draft = argument.partition("@")
        draft_size = _parse_size(spec, draft, MAX_BLOCK_SIZE) if draft else None
        return TreePilot(_parse_size(spec, nodes, MAX_TREE_NODES), draft_size)
    if spec in ("auto", "step", "chain-step"):
        folder = shipped_pilot(target, drafter)
        if folder is None:  # no fit for this pair: the drafter's scores are taken at their word
            return StepPilot(Calibration.identity(), costs(), is_chain=is_chain, label=spec, reads_copies=not is_chain)
    elif kind == "prefill" and argument:
        folder = Path(os.path.expanduser(argument))
        if (found := read_card(folder).kind) != "prefill":
            raise InputError(f"pilot {spec!r:.80}: the folder holds a pilot of kind {found!r}, not 'prefill'")
    elif spec and os.path.isdir(named := os.path.expanduser(spec)):
        folder = Path(named)
    else:
        raise InputError(f"unknown pilot {spec!r:.80}; known: {KNOWN}")
    return load_pilot_folder(folder, costs, is_chain=is_chain, max_block_size=max_block_size, name=spec)


def shipped_pilot(target: str, drafter: str) -> Path | None:
    """The folder of the pilot that ships for a pair, if there is one."""
    if Path(target).name != target:
        return None
    folder = ASSETS / f"{target}-pilot"
    return folder if os.path.isfile(folder / "pilot.json") and read_card(folder).drafter == drafter else None


def _parse_size(spec: str, argument: str, limit: int) -> int:
    is_number = argument.isascii() and argument.isdigit() and len(argument) <= _MAX_DIGITS
    if not is_number or not 1 <= int(argument) <= limit:
        raise InputError(f"pilot {spec!r:.80}: the size must be a whole number from 1 to {limit}")
    return int(argument)
