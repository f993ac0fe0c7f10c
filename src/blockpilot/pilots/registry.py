"""From the text of `--pilot` to a pilot."""

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot

KNOWN = f"ar, fixed:B (B from 1 to {MAX_BLOCK_SIZE}), tree:N or tree:N@B (N nodes, N to {MAX_TREE_NODES}), auto"


AUTO_PILOTS = {"cpu": TreePilot(3, draft_size=4)}  # the fastest on calibration prompts: benchmarks/pair_speed.py
AUTO_ELSEWHERE = TreePilot(15)  # where a wide verify costs hardly more than a plain step


def load_pilot(spec: str, *, has_drafter: bool = True, device_type: str = "cpu") -> Pilot:
    """A pilot by name. `auto` is plain decoding without a drafter, and a small fixed tree for the device with one."""
    kind, _, argument = spec.partition(":")
    if spec == "auto":
        return AUTO_PILOTS.get(device_type, AUTO_ELSEWHERE) if has_drafter else PlainPilot()
    if spec == "ar":
        return PlainPilot()
    if kind == "fixed":
        size = _parse_size(spec, argument, MAX_BLOCK_SIZE)
        return FixedPilot(size) if size > 1 else PlainPilot()
    if kind == "tree":
        nodes, _, draft = argument.partition("@")
        draft_size = _parse_size(spec, draft, MAX_BLOCK_SIZE) if draft else None
        return TreePilot(_parse_size(spec, nodes, MAX_TREE_NODES), draft_size)
    raise InputError(f"unknown pilot {spec!r}; known: {KNOWN}")


def _parse_size(spec: str, argument: str, limit: int) -> int:
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= limit:
        raise InputError(f"pilot {spec!r}: the size must be a whole number from 1 to {limit}")
    return int(argument)
