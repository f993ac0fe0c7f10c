"""From the configured pilot and a request's override to pilots that vLLM can run: chains, no trees."""

import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.reading import read_json
from blockpilot.pilots.base import Drafted, Pilot, Selection
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import load_pilot_folder
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.pilots.registry import load_pilot

BY_REQUEST = ("ar", "fixed", "chain-step", "probe")  # no paths: a request must not make the server read files
EXPORT_MARKER = "blockpilot_export.json"
_MAX_MARKER_BYTES = 1 << 20
_MAX_DIGITS = 4


@dataclass(frozen=True)
class ProbePilot(FixedPilot):
    """`probe:B:N` drafts blocks of B and checks N tokens of them: for measuring what drafts and checks cost."""

    num_kept: int = 0

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return [Selection(found.tree.up_to(self.num_kept)) for found in super().select(requests)]


class PilotChoice:
    """The configured pilot, loaded at once, and others when a request first asks for them."""

    def __init__(self, spec: str, *, target: str, drafter: str, costs: Callable[[], StepCosts]) -> None:
        self.spec, self.target, self.drafter, self.costs = spec, model_name(target), model_name(drafter), costs
        self._loaded: dict[str, Pilot] = {}
        self.configured = self._load(spec)

    def __call__(self, override: object) -> Pilot:
        if override is None or override == self.spec:
            return self.configured
        if not isinstance(override, str) or override.partition(":")[0] not in BY_REQUEST:
            raise InputError(
                f"a request may ask for ar, fixed:B, chain-step or the server's own pilot, not for {override!r:.80}"
            )
        if override not in self._loaded:
            self._loaded[override] = self._load(override)
        return self._loaded[override]

    def _load(self, spec: str) -> Pilot:
        if spec.startswith("probe:"):
            return _parse_probe(spec)
        folder = Path(os.path.expanduser(spec))
        if os.path.isdir(folder):
            return load_pilot_folder(folder, self.costs, is_chain=True, name=spec)
        name = "chain-step" if spec == "auto" else spec
        pilot = load_pilot(name, target=self.target, drafter=self.drafter, costs=self.costs)
        if pilot.num_candidates > 1:
            raise InputError(f"pilot {spec!r} wants trees, and vLLM checks chains: use chain-step or fixed:B")
        return pilot


def model_name(path: str) -> str:
    """The name that pilots know a model by: that of the preset a folder was exported from, else the folder's own."""
    try:
        marker: dict[str, Any] | None = read_json(Path(path) / EXPORT_MARKER, most=_MAX_MARKER_BYTES)
    except InputError:
        marker = None
    source = (marker or {}).get("source")
    return source if isinstance(source, str) else Path(path).name


def _parse_probe(spec: str) -> ProbePilot:
    parts = spec.split(":")[1:]
    is_size = [part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts]
    if len(parts) != 2 or not all(is_size) or not int(parts[0]):
        raise InputError(f"pilot {spec!r:.80}: write probe:B:N, a block size and the number of tokens to check")
    return ProbePilot(block_size=int(parts[0]), num_kept=int(parts[1]))
