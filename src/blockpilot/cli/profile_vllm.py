"""`blockpilot profile --engine vllm`: starts vLLM with the plugin on and lets it take probing steps."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import show_progress
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.pilots.cost_model import StepCosts

NUM_DRAFT_TOKENS = 15
ROOM = 512  # tokens beyond the context


def measure_vllm(
    arguments: argparse.Namespace, batch_sizes: tuple[int, ...], contexts: tuple[int, ...]
) -> tuple["StepCosts", Path]:
    """Measured costs and the file that the plugin will find them in."""
    if len(contexts) != 1:
        raise InputError("--contexts: inside vLLM one context is measured at a time")
    options = engine_options(arguments, max(batch_sizes), contexts[0])
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
    except ImportError as error:
        raise InputError(f"vLLM cannot be imported here ({error}): pip install 'blockpilot[vllm]'") from error

    from blockpilot.integrations.vllm.costs import engine_key, remember_costs
    from blockpilot.integrations.vllm.profile import ProbePlan, measure_costs

    plan = ProbePlan(
        num_draft_tokens=options["speculative_config"]["num_speculative_tokens"],
        batch_sizes=batch_sizes,
        context=contexts[0],
        num_rounds=2 if arguments.quick else 8,
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**options))
    key = engine_key(engine.vllm_config)
    try:
        with show_progress("measuring"):
            costs = measure_costs(engine, SamplingParams, plan, key)
    finally:
        engine.engine_core.shutdown()
    return costs, remember_costs(costs, key)


def engine_options(arguments: argparse.Namespace, batch_size: int, context: int) -> dict[str, Any]:
    """Arguments of vLLM's engine; those of the user come last."""
    from blockpilot.models.export import public_drafter

    try:
        given = json.loads(arguments.engine_args)
    except ValueError as error:
        raise InputError(f"--engine-args is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise InputError("--engine-args must be a JSON object, such as '{\"tensor_parallel_size\": 2}'")
    if arguments.drafter in ("auto", "none", "ngram"):
        raise InputError("--engine vllm measures a DFlash drafter: name its folder with --drafter")
    drafter = public_drafter(arguments.drafter)
    options = {
        "model": arguments.target,
        "dtype": arguments.dtype,
        "max_num_seqs": batch_size,
        "max_model_len": context + ROOM,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "speculative_config": {"method": "dflash", "model": drafter, "num_speculative_tokens": NUM_DRAFT_TOKENS},
        "additional_config": {"blockpilot": "fixed:1"},
    }
    return options | given
