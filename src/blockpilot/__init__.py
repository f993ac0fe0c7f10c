"""BlockPilot: lossless speculative decoding with block drafters.

Public names are loaded on first use, so that `import blockpilot` and `blockpilot --help` stay fast.
"""

from typing import TYPE_CHECKING, Any

from blockpilot.core.config import let_threads_sleep

if TYPE_CHECKING:
    from blockpilot.core.config import EngineConfig
    from blockpilot.core.errors import BlockPilotError, InputError
    from blockpilot.core.records import Completion, StepRecord
    from blockpilot.core.sampling_params import SamplingParams
    from blockpilot.engine.llm import LLM
    from blockpilot.pilots.registry import load_pilot

__version__ = "0.1.0"

let_threads_sleep()

_HOMES = {
    "LLM": "blockpilot.engine.llm",
    "EngineConfig": "blockpilot.core.config",
    "SamplingParams": "blockpilot.core.sampling_params",
    "Completion": "blockpilot.core.records",
    "StepRecord": "blockpilot.core.records",
    "BlockPilotError": "blockpilot.core.errors",
    "InputError": "blockpilot.core.errors",
    "load_pilot": "blockpilot.pilots.registry",
}
__all__ = [
    "LLM",
    "BlockPilotError",
    "Completion",
    "EngineConfig",
    "InputError",
    "SamplingParams",
    "StepRecord",
    "load_pilot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockpilot' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
