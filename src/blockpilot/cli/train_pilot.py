"""`blockpilot train-pilot`: traces in, a pilot out, with what it gains on traces it has not seen.

`blockpilot train-pilot --kind prefill` alone builds the paper's pilot of the default target from traces that come
with the package, and puts it where `blockpilot bench` looks for it.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.collect import DEFAULT_TARGET
from blockpilot.cli.console import print_columns, print_json, print_note, show_counted, show_progress
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.pilots.base import Pilot
    from blockpilot.pilots.cost_model import StepCosts
    from blockpilot.pilots.prefill import PrefillConfig
    from blockpilot.replay.pilot_report import Row
    from blockpilot.replay.pilot_training import TraceGroup

KINDS = ("step", "prefill")
INPUTS = ("distribution", "normalised", "softmax", "top-k", "hidden")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    traces_help = "written by `blockpilot collect` (default for prefill: those that ship for the default target)"
    add("--traces", nargs="+", type=Path, default=[], metavar="DIR", help=traces_help)
    held_out_help = "traces to judge by, of other prompts (default: a quarter of --traces)"
    add("--held-out", nargs="+", type=Path, default=[], metavar="DIR", help=held_out_help)
    out_help = "the pilot's folder: use it as --pilot DIR (default for prefill: where `blockpilot bench` looks)"
    add("--out", type=Path, default=None, metavar="DIR", help=out_help)
    add("--kind", choices=KINDS, default="step", help="step: adaptive trees and chains; prefill: the paper's")
    profile_help = "judge by this machine's step costs: a file named by `blockpilot profile`"
    add("--profile", type=Path, default=None, metavar="FILE", help=profile_help)
    add("--json", action="store_true", help="print one JSON object at the end")
    group = parser.add_argument_group("prefill")
    radius_help = "choose among B-k .. B+k around the trained size (default: 2)"
    group.add_argument("--radius", type=int, default=2, metavar="K", help=radius_help)
    group.add_argument("--sizes", default=None, metavar="B,...", help="choose among these instead")
    group.add_argument("--inputs", choices=INPUTS, default="distribution", help="default: distribution")
    group.add_argument("--hidden-size", type=int, default=2048, metavar="N", help="default: 2048")
    group.add_argument("--layers", type=int, default=2, metavar="N", help="default: 2")
    objective_help = "class: the best size, as published; tau: how much each size brings, weighed by its cost"
    group.add_argument("--objective", choices=("class", "tau"), default="class", help=objective_help)
    epochs_help = "default: as many as make 1500 steps of 64 requests"
    group.add_argument("--epochs", type=int, default=None, metavar="N", help=epochs_help)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--device", default="cpu", help="to train on: cpu or cuda (default: cpu)")


def run(arguments: argparse.Namespace) -> int:
    for name in ("radius", "epochs"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise InputError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.kind == "step" and (not arguments.traces or arguments.out is None):
        raise InputError("--kind step needs --traces and --out")
    with show_progress("reading traces"):
        from blockpilot.core.device import resolve_device
        from blockpilot.replay.pilot_training import check_enough, hold_out, read_group
        from blockpilot.replay.trace_files import require_disjoint

        resolve_device(arguments.device)
        group = read_group(arguments.traces or [_shipped_traces()])
        if arguments.held_out:
            train, test = group, read_group(arguments.held_out, like=group)
            require_disjoint(train.traces, test.traces)
        else:
            train, test = hold_out(group)
        check_enough(train, "training")
    if not test.traces:
        raise InputError("no traces are left to judge by: give --held-out, or collect more prompts")
    if arguments.out is None:
        arguments.out = _default_out(group)
    loads = _find_loads(arguments.profile)
    pilots, facts = (_fit_step if arguments.kind == "step" else _fit_prefill)(arguments, train, test)
    rows = _judge(train, test, pilots, loads)
    _print_result(arguments, facts, rows)
    return 0


def _shipped_traces() -> Path:
    from blockpilot.replay.compact import shipped_traces

    if (folder := shipped_traces(DEFAULT_TARGET)) is None:
        raise InputError(f"no traces ship for {DEFAULT_TARGET}: give --traces, written by `blockpilot collect`")
    return folder


def _default_out(group: "TraceGroup") -> Path:
    from blockpilot.bench.methods import paper_pilot_folder

    return paper_pilot_folder(group.manifest["target"])


def _find_loads(profile: Path | None) -> "dict[str, StepCosts]":
    from blockpilot.replay.pilot_report import linear_loads

    if profile is None:
        return linear_loads()
    from blockpilot.engine.profile import read_profile

    return {"this machine": read_profile(profile), **linear_loads()}


def _fit_step(
    arguments: argparse.Namespace, train: "TraceGroup", test: "TraceGroup"
) -> "tuple[list[Pilot], dict[str, Any]]":
    from blockpilot.pilots.files import save_pilot
    from blockpilot.replay.pilot_report import draw_reliability, judge_calibration
    from blockpilot.replay.pilot_training import train_step

    with show_progress("fitting"):
        tree, chain = train_step(train)
        reports = judge_calibration(tree, test.traces)
    errors = {task: round(report.error, 4) for task, report in reports.items()}
    facts = _facts(arguments, train, test) | {"calibration_error": errors}
    save_pilot(arguments.out, [tree, chain], training=facts, **_pair(train))
    draw_reliability(arguments.out, reports)
    return [chain, tree], facts


def _fit_prefill(
    arguments: argparse.Namespace, train: "TraceGroup", test: "TraceGroup"
) -> "tuple[list[Pilot], dict[str, Any]]":
    from blockpilot.pilots.files import save_pilot
    from blockpilot.replay.pilot_training import train_prefill_pilot

    config = _prefill_config(arguments, train)
    with show_counted("epochs") as report:
        pilot = train_prefill_pilot(
            train,
            config,
            num_epochs=arguments.epochs,
            seed=arguments.seed,
            device=arguments.device,
            report=lambda done, total: report("training the network", done, total),
        )
    facts = _facts(arguments, train, test)
    with show_progress("writing the pilot"):
        save_pilot(arguments.out, pilot, training=facts, **_pair(train))
    return [pilot], facts


def _prefill_config(arguments: argparse.Namespace, train: "TraceGroup") -> "PrefillConfig":
    from blockpilot.pilots.prefill import PrefillConfig, sizes_around

    setting = train.traces[0].setting
    sizes = (
        _parse_sizes(arguments.sizes) if arguments.sizes else sizes_around(setting.trained_block_size, arguments.radius)
    )
    if missing := [size for size in sizes if size not in setting.sizes]:
        held = ", ".join(map(str, setting.sizes))
        raise InputError(f"block size {missing[0]} is not in the traces; they hold {held}: collect with --sizes")
    is_hidden = arguments.inputs == "hidden"
    return PrefillConfig(
        input_size=len(train.traces[0].prefill.hidden) if is_hidden else setting.vocab_size,
        sizes=sizes,
        inputs=arguments.inputs,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.layers,
        objective=arguments.objective,
    )


def _pair(group: "TraceGroup") -> dict[str, str]:
    return {"target": group.manifest["target"], "drafter": group.manifest["drafter"]}


def _facts(arguments: argparse.Namespace, train: "TraceGroup", test: "TraceGroup") -> dict[str, Any]:
    return {
        "num_traces": len(train.traces),
        "num_anchors": train.num_anchors,
        "num_held_out": len(test.traces),
        "tasks": sorted({trace.task for trace in train.traces}),
        "temperatures": sorted({trace.temperature for trace in train.traces}),
        "drafter_sha256": train.manifest.get("drafter_sha256"),
    }


def _judge(
    train: "TraceGroup", test: "TraceGroup", pilots: "list[Pilot]", loads: "dict[str, StepCosts]"
) -> "list[Row]":
    from blockpilot.replay.pilot_report import compare

    rows: list[Row] = []
    for name, costs in loads.items():
        with show_progress(f"judging under the load {name!r}"):
            rows += compare(train.traces, test.traces, pilots, costs, load=name)
    return rows


def _print_result(arguments: argparse.Namespace, facts: dict[str, Any], rows: "list[Row]") -> None:
    if arguments.json:
        print_json({"out": str(arguments.out), **facts, "rows": [row.to_dict() for row in rows]})
        return
    print_columns(
        {
            "load": [row.load for row in rows],
            "method": [row.method for row in rows],
            "tau": [f"{row.tau:.2f}" for row in rows],
            "x plain": [f"{row.over_plain:.2f}" for row in rows],
            "x best fixed": [f"{row.over_best_fixed:.3f}" for row in rows],
            "95 %": [f"{row.interval[0]:.3f} to {row.interval[1]:.3f}" for row in rows],
            "tokens checked": [f"{row.verify_size:.1f}" for row in rows],
        }
    )
    if errors := facts.get("calibration_error"):
        worst = max((task for task in errors if task != "all"), key=errors.__getitem__)
        print_note(f"calibration error {errors['all']:.3f} on held-out nodes, worst {errors[worst]:.3f} ({worst})")
    print_note(
        f"{facts['num_traces']} traces fitted, {facts['num_held_out']} held out; the pilot is in {arguments.out}"
    )


def _parse_sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--sizes {text!r}: give block sizes separated by commas, such as 4,8,16")
    return tuple(sorted({int(part) for part in parts}))
