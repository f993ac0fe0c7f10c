"""One target in memory, one `LLM` per drafter around it.

An `LLM` has one drafter. Drafters may copy rows of the target's head, so all are built before the first `LLM` packs the
target's weights; the others find them packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from blockpilot.bench.methods import DRAFTER_OPTIONS, NO_DRAFTER, Method
from blockpilot.core.config import EngineConfig
from blockpilot.core.device import resolve_device
from blockpilot.core.errors import InputError
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.engine.assemble import build_drafter
from blockpilot.engine.llm import LLM, resolve_context
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.loading import LoadedTarget
from blockpilot.models.packing import choose_backend

DrafterSpec = str | Drafter | DFlash | Eagle3
KINDS = {"dflash": DFlashDrafter, "eagle3": Eagle3Drafter}


@dataclass(frozen=True)
class Engines:
    llms: Mapping[str, LLM]  # by kind of drafter; `none` is always there

    @classmethod
    def build(
        cls,
        loaded: LoadedTarget,
        drafters: Mapping[str, DrafterSpec],
        config: EngineConfig,
        costs: Path | None = None,
    ) -> "Engines":
        """`costs`: step costs for pilots that weigh them, measured with the DFlash drafter."""
        device, dtype = resolve_device(config.device), getattr(torch, config.dtype)
        loaded.decoder.to(device=device, dtype=dtype).eval().requires_grad_(False)
        built: dict[str, Drafter | None] = {NO_DRAFTER: None}
        for kind, spec in drafters.items():
            built[kind] = build_drafter(
                spec,
                loaded.decoder,
                config=config,
                context_length=resolve_context(config.context_length, loaded.decoder.config.context_length),
                device=device,
                dtype=dtype,
                backend=choose_backend(config.linear_backend, device, dtype),
            )
            _check_kind(kind, spec, built[kind])
        return cls(
            {
                kind: LLM(loaded, drafter=drafter, pilot="ar", config=config, costs=costs if kind == "dflash" else None)
                for kind, drafter in built.items()
            }
        )

    @property
    def plain(self) -> LLM:
        return self.llms[NO_DRAFTER]

    def of(self, method: Method) -> LLM:
        return self.llms[method.drafter]


def _check_kind(kind: str, spec: DrafterSpec, built: Drafter | None) -> None:
    if isinstance(spec, str) and kind in KINDS and not isinstance(built, KINDS[kind]):
        raise InputError(f"{DRAFTER_OPTIONS[kind]} {spec} is no {kind} drafter")
