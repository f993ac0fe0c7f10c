"""What the user asked for: a pilot in BLOCKPILOT_PILOT or in vLLM's `additional_config`. Without one the plugin is off.

`additional_config` wins, because it travels with vLLM's configuration to workers on other nodes:

    {"blockpilot": "chain-step"}, or {"blockpilot": {"pilot": "chain-step"}}
"""

import logging
from collections.abc import Mapping
from typing import Any

from blockpilot.core.config import chosen_pilot
from blockpilot.core.errors import InputError

logger = logging.getLogger("vllm.blockpilot")  # vLLM prints what is logged under its own name
SUPPORTED = ((0, 32), (0, 33))  # from the first to below the second
KEY = "blockpilot"  # in `additional_config`, and in the `extra_args` of a request


def read_pilot(vllm_config: Any) -> str | None:
    """The pilot of one engine; None: the plugin is off."""
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    if given is None:
        return chosen_pilot()
    options = {"pilot": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping) or not isinstance(options.get("pilot"), str):
        raise InputError(f"additional_config: {KEY!r} must name a pilot, as in {{'blockpilot': 'chain-step'}}")
    if unknown := set(options) - {"pilot"}:
        raise InputError(f"additional_config: {KEY!r} has no option {sorted(unknown)[0]!r}; known: pilot")
    return str(options["pilot"])


def is_supported(version: str) -> bool:
    """Whether the plugin was made for this version of vLLM: its first two numbers decide."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return False
    return SUPPORTED[0] <= (int(parts[0]), int(parts[1])) < SUPPORTED[1]
