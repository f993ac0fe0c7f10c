"""`blockpilot profile`: what drafts and checks cost on this machine, in our engine or inside vLLM. Pilots read it."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import print_columns, print_json, print_note, show_counted, show_progress
from blockpilot.cli.options import add_option, add_target_options, read_count, read_engine_config, read_list
from blockpilot.core.config import MAX_TREE_NODES, default_dtype, device_type
from blockpilot.core.errors import InputError
from blockpilot.core.reading import decode_json

if TYPE_CHECKING:
    from blockpilot.pilots.cost_model import CostPoint, StepCosts

BATCH_SIZES = {"cpu": "1", "cuda": "1,4,16,64"}  # what engines of up to 64 slots ask for
_ROOM = 2 * MAX_TREE_NODES  # tokens behind the longest context; slots of a target's whole context may not fit 64 times
_VLLM_DRAFT_TOKENS = 15
_VLLM_ROOM = 512  # tokens beyond the context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_options(parser, "as for generate")
    sizes_help = f"requests per step (default: {BATCH_SIZES['cpu']} on a CPU, {BATCH_SIZES['cuda']} on a GPU)"
    parser.add_argument("--batch-sizes", metavar="N,N,...", help=sizes_help)
    context_help = "tokens in each request's cache; with two or more, the effect of context is known"
    add_option(parser, "--contexts", "256", context_help, metavar="N,N,...")
    add_option(parser, "--engine", "blockpilot", "whose steps", choices=("blockpilot", "vllm"))
    engine_help = "with vllm: more arguments of its engine, as one JSON object"
    parser.add_argument("--engine-args", default="{}", metavar="JSON", help=engine_help)
    quick_help = "fewer sizes and rounds: what pilots measure by themselves"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--force", action="store_true", help="measure again even if this machine was measured before")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the profile and its path")


def run(arguments: argparse.Namespace) -> int:
    sizes = BATCH_SIZES[device_type(arguments.device)] if arguments.batch_sizes is None else arguments.batch_sizes
    batch_sizes, contexts = (
        _read_counts(sizes, "--batch-sizes", 4096),
        _read_counts(arguments.contexts, "--contexts", 2**20),
    )
    measure = _measure_vllm if arguments.engine == "vllm" else _measure
    costs, path = measure(arguments, batch_sizes, contexts)
    if arguments.json:
        print_json({"path": str(path), "fit_error": vars(costs.fit_error), **costs.to_dict()})
    else:
        _print_table(costs)
        print_note(f"written to {path}")
    return 0


def _measure(
    arguments: argparse.Namespace, batch_sizes: tuple[int, ...], contexts: tuple[int, ...]
) -> tuple["StepCosts", Path]:
    """Costs of our own engine, remembered or measured now, and the file they are in."""
    config = read_engine_config(arguments, num_slots=max(batch_sizes))
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.core.device import resolve_device, torch_dtype
        from blockpilot.engine.llm import LLM
        from blockpilot.engine.profile import load_profile, measure, profile_key, profile_path, remember
        from blockpilot.engine.step_timing import ProfilePlan
        from blockpilot.models.loading import load_target

        resolve_device(config.device)
        target = load_target(arguments.target, torch_dtype(config.dtype), progress, quantize=config.quantize)
        length = min(max(contexts) + _ROOM, target.decoder.config.context_length)
        llm = LLM(target, drafter=arguments.drafter, pilot="ar", config=replace(config, context_length=length))
    make_plan = ProfilePlan.quick if arguments.quick else ProfilePlan.full
    plan = make_plan(batch_sizes, contexts, is_gpu=llm.device_type == "cuda")
    costs = None if arguments.force else load_profile(profile_key(llm))
    # a remembered profile will do if no place is missing, but not a quick one for a full one
    places = {(point.batch_size, point.context_length) for point in costs.verify} if costs else set()
    is_covered = places.issuperset((size, context) for size in plan.batch_sizes for context in plan.contexts)
    if costs is not None and is_covered and (plan.is_quick or not costs.key.get("is_quick")):
        print_note(f"measured {costs.key.get('created')}; --force measures again")
    else:
        with show_counted("measured") as report:
            costs = remember(measure(llm, plan, report))
    return costs, profile_path(dict(costs.key))


def _print_table(costs: "StepCosts") -> None:
    rows = []
    drafts = {(point.tokens, point.batch_size, point.context_length): point for point in costs.draft}
    checks = {(point.tokens, point.batch_size, point.context_length): point for point in costs.verify}
    for place in sorted({*drafts, *checks}, key=lambda place: (place[1], place[2], place[0])):
        points = checks.get(place), drafts.get(place)
        spread = max(point.spread for point in points if point is not None)
        rows.append([*map(str, place), *map(_format, points), f"{100 * spread:.0f} %"])
    headings = ("tokens", "batch", "context", "verify", "draft", "spread")
    print_columns(dict(zip(headings, zip(*rows, strict=True), strict=True)))
    error = costs.fit_error
    print(
        f"overhead {costs.overhead_ms:.2f} ms; fit error {100 * error.leave_one_out:.1f} % "
        f"(worst {100 * error.worst:.1f} %), spread of repeats {100 * error.spread:.1f} %"
    )


def _format(point: "CostPoint | None") -> str:
    return "-" if point is None else f"{point.ms:.2f} ms"


def _read_counts(text: str, flag: str, most: int) -> tuple[int, ...]:
    advice = f"give whole numbers from 1 to {most}, separated by commas"
    return tuple(sorted(set(read_list(text, flag, lambda part: read_count(part, most), advice))))


def _measure_vllm(
    arguments: argparse.Namespace, batch_sizes: tuple[int, ...], contexts: tuple[int, ...]
) -> tuple["StepCosts", Path]:
    """Start vLLM with our plugin on and let it take probing steps; the file is where the plugin looks for them."""
    if len(contexts) != 1:
        raise InputError("--contexts: inside vLLM one context is measured at a time")
    options = vllm_options(arguments, max(batch_sizes), contexts[0])
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


def vllm_options(arguments: argparse.Namespace, batch_size: int, context: int) -> dict[str, Any]:
    """Arguments of vLLM's engine; those of the user come last."""
    from blockpilot.models.export import public_drafter

    example = "give a JSON object, such as '{\"tensor_parallel_size\": 2}'"
    given: dict[str, Any] = decode_json(arguments.engine_args, dict[str, Any], "--engine-args", example)
    if arguments.drafter in ("auto", "none", "ngram"):
        raise InputError("--engine vllm measures a DFlash drafter: name its folder with --drafter")
    drafter = public_drafter(arguments.drafter)
    options = {
        "model": arguments.target,
        "dtype": arguments.dtype or default_dtype(arguments.device),
        "max_num_seqs": batch_size,
        "max_model_len": context + _VLLM_ROOM,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "speculative_config": {"method": "dflash", "model": drafter, "num_speculative_tokens": _VLLM_DRAFT_TOKENS},
        "additional_config": {"blockpilot": "fixed:1"},
    }
    return options | given
