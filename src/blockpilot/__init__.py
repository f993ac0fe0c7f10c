"""BlockPilot: lossless speculative decoding with block drafters.

Public names are loaded on first use, so that `import blockpilot` and `blockpilot --help` stay fast.
"""

from typing import TYPE_CHECKING, Any

from blockpilot.core.config import let_threads_sleep

if TYPE_CHECKING:
    from blockpilot.core.config import EngineConfig
    from blockpilot.core.errors import BlockPilotError, InputError, RequestFailedError
    from blockpilot.core.guide import Guide
    from blockpilot.core.records import Completion, StepRecord, TokenScore
    from blockpilot.core.sampling_params import SamplingParams
    from blockpilot.engine.llm import LLM
    from blockpilot.pilots.registry import load_pilot

__version__ = "0.1.0"

let_threads_sleep()

_HOMES = {
    "LLM": "blockpilot.engine.llm",
    "EngineConfig": "blockpilot.core.config",
    "SamplingParams": "blockpilot.core.sampling_params",
    "Guide": "blockpilot.core.guide",
    "Completion": "blockpilot.core.records",
    "StepRecord": "blockpilot.core.records",
    "BlockPilotError": "blockpilot.core.errors",
    "InputError": "blockpilot.core.errors",
    "RequestFailedError": "blockpilot.core.errors",
    "TokenScore": "blockpilot.core.records",
    "load_pilot": "blockpilot.pilots.registry",
}
__all__ = [
    "LLM",
    "BlockPilotError",
    "Completion",
    "EngineConfig",
    "Guide",
    "InputError",
    "RequestFailedError",
    "SamplingParams",
    "StepRecord",
    "TokenScore",
    "load_pilot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockpilot' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
