"""`blockpilot profile`: what drafts and checks cost on this machine. Pilots read the result."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import print_columns, print_json, print_note, show_counted, show_progress
from blockpilot.core.config import MAX_TREE_NODES, EngineConfig, default_dtype, device_type
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from blockpilot.engine.llm import LLM
    from blockpilot.engine.step_timing import ProfilePlan
    from blockpilot.pilots.cost_model import CostPoint, StepCosts

DEFAULT_TARGET = "smollm2-135m"
BATCH_SIZES = {"cpu": "1", "cuda": "1,4,16,64"}  # what engines of up to 64 slots ask for
ROOM = 2 * MAX_TREE_NODES  # tokens behind the longest context; slots of a target's whole context may not fit 64 times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=f"default: {DEFAULT_TARGET}")
    drafter_help = "as for generate (default: auto, the one that ships for the target)"
    parser.add_argument("--drafter", default="auto", metavar="MODEL", help=drafter_help)
    parser.add_argument("--device", default=default.device, help=f"cpu or cuda (default: {default.device})")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    sizes_help = f"requests per step (default: {BATCH_SIZES['cpu']} on a CPU, {BATCH_SIZES['cuda']} on a GPU)"
    parser.add_argument("--batch-sizes", default=None, metavar="N,N,...", help=sizes_help)
    context_help = "tokens in each request's cache; with two or more, the effect of context is known (default: 256)"
    parser.add_argument("--contexts", default="256", metavar="N,N,...", help=context_help)
    parser.add_argument(
        "--engine", choices=("blockpilot", "vllm"), default="blockpilot", help="whose steps (default: blockpilot)"
    )
    engine_help = "with vllm: more arguments of its engine, as one JSON object"
    parser.add_argument("--engine-args", default="{}", metavar="JSON", help=engine_help)
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and rounds: what pilots measure by themselves"
    )
    parser.add_argument("--force", action="store_true", help="measure again even if this machine was measured before")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the profile and its path")


def run(arguments: argparse.Namespace) -> int:
    arguments.dtype = arguments.dtype or default_dtype(arguments.device)
    if arguments.batch_sizes is None:
        arguments.batch_sizes = BATCH_SIZES[device_type(arguments.device)]
    batch_sizes = _parse_counts(arguments.batch_sizes, "--batch-sizes")
    contexts = _parse_counts(arguments.contexts, "--contexts")
    if arguments.engine == "vllm":
        from blockpilot.cli.profile_vllm import measure_vllm

        _show(*measure_vllm(arguments, batch_sizes, contexts), is_json=arguments.json)
        return 0
    config = EngineConfig(device=arguments.device, dtype=arguments.dtype, num_slots=max(batch_sizes))
    llm = _load(arguments, config, max(contexts))

    from blockpilot.engine.profile import profile_path
    from blockpilot.engine.step_timing import ProfilePlan

    make_plan = ProfilePlan.quick if arguments.quick else ProfilePlan.full
    plan = make_plan(batch_sizes, contexts, is_gpu=llm.device_type == "cuda")
    costs = _find_costs(llm, plan, is_forced=arguments.force)
    _show(costs, profile_path(dict(costs.key)), is_json=arguments.json)
    return 0


def _load(arguments: argparse.Namespace, config: EngineConfig, context: int) -> "LLM":
    with show_progress(f"loading {arguments.target}") as progress:
        import torch

        from blockpilot.core.device import resolve_device
        from blockpilot.engine.llm import LLM
        from blockpilot.models.loading import load_target

        resolve_device(config.device)
        target = load_target(arguments.target, getattr(torch, config.dtype), progress)
        length = min(context + ROOM, target.decoder.config.context_length)
        config = replace(config, context_length=length)
        return LLM(target, drafter=arguments.drafter, pilot="ar", config=config)


def _show(costs: "StepCosts", path: "Path", *, is_json: bool) -> None:
    if is_json:
        print_json({"path": str(path), "fit_error": vars(costs.fit_error), **costs.to_dict()})
    else:
        _print_table(costs)
        print_note(f"written to {path}")


def _find_costs(llm: "LLM", plan: "ProfilePlan", *, is_forced: bool) -> "StepCosts":
    from blockpilot.engine.profile import load_profile, measure, profile_key, remember

    known = None if is_forced else load_profile(profile_key(llm))
    if known is not None and _covers(known, plan):
        print_note(f"measured {known.key.get('created')}; --force measures again")
        return known
    with show_counted("measured") as report:
        return remember(measure(llm, plan, report))


def _covers(costs: "StepCosts", plan: "ProfilePlan") -> bool:
    """Whether a remembered profile answers the question: not a quick one for a full one, and no place missing."""
    places = {(point.batch_size, point.context_length) for point in costs.verify}
    wanted = {(size, context) for size in plan.batch_sizes for context in plan.contexts}
    return wanted <= places and (plan.is_quick or not costs.key.get("is_quick"))


def _print_table(costs: "StepCosts") -> None:
    columns: dict[str, list[str]] = {"tokens": [], "batch": [], "context": [], "verify": [], "draft": [], "spread": []}
    drafts = {(point.tokens, point.batch_size, point.context_length): point for point in costs.draft}
    checks = {(point.tokens, point.batch_size, point.context_length): point for point in costs.verify}
    for place in sorted({*drafts, *checks}, key=lambda place: (place[1], place[2], place[0])):
        draft, check = drafts.get(place), checks.get(place)
        spread = max(point.spread for point in (draft, check) if point is not None)
        cells: dict[str, Any] = dict(zip(("tokens", "batch", "context"), map(str, place), strict=True))
        cells |= {"verify": _format(check), "draft": _format(draft), "spread": f"{100 * spread:.0f} %"}
        for name, cell in cells.items():
            columns[name].append(cell)
    print_columns(columns)
    error = costs.fit_error
    print(
        f"overhead {costs.overhead_ms:.2f} ms; fit error {100 * error.leave_one_out:.1f} % "
        f"(worst {100 * error.worst:.1f} %), spread of repeats {100 * error.spread:.1f} %"
    )


def _format(point: "CostPoint | None") -> str:
    return "-" if point is None else f"{point.ms:.2f} ms"


def _parse_counts(text: str, name: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 1_000_000 for part in parts):
        raise InputError(f"{name} {text!r}: give whole numbers above 0, separated by commas")
    return tuple(sorted({int(part) for part in parts}))
