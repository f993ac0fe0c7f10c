"""What steps cost inside vLLM: `blockpilot profile --engine vllm` measures it once, the plugin reads it.

The file is named after everything that the costs depend on, so that a worker finds those of its own engine. Without one
checking is taken to be cheap: then only tokens that would hardly ever be accepted are dropped. Nothing is
measured while serving: all workers of an engine must decide alike.
"""

import json
import os
from pathlib import Path
from typing import Any

from blockpilot.core.config import cpu_name, profile_file
from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, write_text
from blockpilot.core.reading import read_json
from blockpilot.integrations.vllm.pilot_choice import model_name
from blockpilot.integrations.vllm.settings import logger
from blockpilot.pilots.cost_model import StepCosts

_MAX_BYTES = 16 * MEGABYTE  # of a file of costs
# In plain steps. On the default pair this loses 1 % of the tokens per step.
ASSUMED = StepCosts.linear(draft=0.15, slope=0.01)


def engine_key(vllm_config: Any) -> dict[str, Any]:
    """The key of the engine in this process."""
    from vllm.platforms import current_platform
    from vllm.version import __version__ as version

    return costs_key(vllm_config, version=version, device=current_platform.get_device_name())


def costs_key(vllm_config: Any, *, version: str, device: str) -> dict[str, Any]:
    """What costs depend on; the same in the front end and in every worker."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    return {
        "engine": f"vllm {version}",
        "target": model_name(model.model),
        "drafter": model_name(speculative.model),
        "device": f"{os.cpu_count()} x {cpu_name()}" if device == "cpu" else device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "is_eager": bool(model.enforce_eager),
        "parallel": f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}",
    }


def costs_path(key: dict[str, Any]) -> Path:
    return profile_file(f"vllm-{key['target']}", key)


def find_costs(key: dict[str, Any]) -> StepCosts:
    """The measured costs, or assumed ones where there are none."""
    path = costs_path(key)
    try:
        if (values := read_json(path, most=_MAX_BYTES)) is not None:
            return StepCosts.from_dict(values)
        reason = "measure them with `blockpilot profile --engine vllm`"
    except InputError as error:
        reason = f"{path} cannot be read: {error}"
    logger.warning("No step costs of this engine are known, so checking is taken to be cheap: %s.", reason)
    return ASSUMED


def remember_costs(costs: StepCosts, key: dict[str, Any]) -> Path:
    path = costs_path(key)
    write_text(path, json.dumps(costs.to_dict(), indent=1) + "\n")
    return path
