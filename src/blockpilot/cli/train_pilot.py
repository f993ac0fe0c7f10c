"""`blockpilot train-pilot`: traces in, a pilot out, with what it gains on traces it has not seen.

`blockpilot train-pilot --kind prefill` alone builds the paper's pilot of the default target from traces that come
with the package, and puts it where `blockpilot bench` looks for it.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import print_columns, print_json, print_note, show_counted, show_progress
from blockpilot.cli.options import DEFAULT_TARGET, add_option, read_count, read_fields, read_list
from blockpilot.core.errors import InputError, require_at_least, require_at_most
from blockpilot.core.locks import command_name, hold_folder
from blockpilot.core.manifests import PILOT, require_room

if TYPE_CHECKING:
    from blockpilot.pilots.base import Pilot
    from blockpilot.replay.pilot_report import Row
    from blockpilot.replay.pilot_training import TraceGroup

_KINDS = ("step", "prefill")
_INPUTS = ("probabilities", "logits", "normalised", "softmax", "top-k", "hidden")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    traces_help = "written by `blockpilot collect` (default for prefill: those that ship for the default target)"
    add("--traces", nargs="+", type=Path, default=[], metavar="DIR", help=traces_help)
    held_out_help = "traces to judge by, of other prompts (default: a quarter of --traces)"
    add("--held-out", nargs="+", type=Path, default=[], metavar="DIR", help=held_out_help)
    out_help = "the pilot's folder: use it as --pilot DIR (default for prefill: where `blockpilot bench` looks)"
    add("--out", type=Path, metavar="DIR", help=out_help)
    add("--kind", choices=_KINDS, default="step", help="step: adaptive trees and chains; prefill: the paper's")
    profile_help = "judge by this machine's step costs: a file named by `blockpilot profile`"
    add("--profile", type=Path, metavar="FILE", help=profile_help)
    add("--json", action="store_true", help="print one JSON object at the end")
    group = parser.add_argument_group("prefill")
    add_option(group, "--radius", 2, "choose among B-k .. B+k around the trained size", metavar="K")
    group.add_argument("--sizes", metavar="B,...", help="choose among these instead")
    input_help = "of the first answer token; logits need traces of `collect --whole-logits`"
    add_option(group, "--input", "probabilities", input_help, dest="inputs", choices=_INPUTS)
    ties_help = "where sizes bring as much, learn the smallest, as published, or the one nearest to the trained size"
    add_option(group, "--ties", "smallest", ties_help, choices=("smallest", "trained"))
    add_option(group, "--hidden-size", 2048)
    add_option(group, "--layers", 2)
    objective_help = "class: the best size, as published; tau: how much each size brings, weighed by its cost"
    group.add_argument("--objective", choices=("class", "tau"), default="class", help=objective_help)
    epochs_help = "default: as many as make 1500 steps of 64 requests"
    group.add_argument("--epochs", type=int, metavar="N", help=epochs_help)
    add_option(group, "--seed", 0)
    add_option(group, "--device", "cpu", "to train on: cpu or cuda", metavar="DEVICE")


def run(arguments: argparse.Namespace) -> int:
    require_at_least(arguments, radius=1, epochs=1, hidden_size=1, layers=1, seed=0)
    require_at_most(arguments, radius=64, epochs=10**6, hidden_size=2**16, layers=64, seed=2**31 - 1)
    if arguments.kind == "step" and (not arguments.traces or arguments.out is None):
        raise InputError("--kind step needs --traces and --out")
    with show_progress("reading traces"):
        from blockpilot.core.device import resolve_device
        from blockpilot.engine.profile import read_profile
        from blockpilot.replay.pilot_report import LOADS, compare
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
        from blockpilot.bench.methods import paper_pilot_folder

        arguments.out = paper_pilot_folder(group.manifest["target"])
    loads = LOADS if arguments.profile is None else {"this machine": read_profile(arguments.profile), **LOADS}
    facts = {
        "num_traces": len(train.traces),
        "num_anchors": train.num_anchors,
        "num_held_out": len(test.traces),
        "tasks": sorted({trace.task for trace in train.traces}),
        "temperatures": sorted({trace.temperature for trace in train.traces}),
        "drafter_sha256": train.manifest.get("drafter_sha256"),
        "prompt_files": train.manifest.get("prompt_files"),
    }
    with hold_folder(arguments.out, command_name()):
        require_room(arguments.out, PILOT)
        pilots = (_fit_step if arguments.kind == "step" else _fit_prefill)(arguments, train, test, facts)
    rows: list[Row] = []
    for name, costs in loads.items():
        with show_progress(f"judging under the load {name!r}"):
            rows += compare(train.traces, test.traces, pilots, costs, load=name)
    _print_result(arguments, facts, rows)
    return 0


def _shipped_traces() -> Path:
    from blockpilot.replay.trace_files import shipped_traces

    if (folder := shipped_traces(DEFAULT_TARGET)) is None:
        raise InputError(f"no traces ship for {DEFAULT_TARGET}: give --traces, written by `blockpilot collect`")
    return folder


def _fit_step(
    arguments: argparse.Namespace, train: "TraceGroup", test: "TraceGroup", facts: dict[str, Any]
) -> "list[Pilot]":
    """Fit a tree and a chain, write them, and add to the facts how well calibrated they are."""
    from blockpilot.replay.pilot_report import draw_reliability, judge_calibration
    from blockpilot.replay.pilot_training import train_step

    with show_progress("fitting"):
        tree, chain = train_step(train)
        reports = judge_calibration(tree, test.traces)
    facts["calibration_error"] = {task: round(report.error, 4) for task, report in reports.items()}
    _save(arguments.out, [tree, chain], train, facts)
    draw_reliability(arguments.out, reports)
    return [chain, tree]


def _fit_prefill(
    arguments: argparse.Namespace, train: "TraceGroup", test: "TraceGroup", facts: dict[str, Any]
) -> "list[Pilot]":
    from blockpilot.pilots.prefill import PrefillConfig, PrefillTraining, sizes_around
    from blockpilot.replay.pilot_training import train_prefill_pilot

    setting = train.traces[0].setting
    sizes = sizes_around(setting.trained_block_size, arguments.radius)
    if arguments.sizes:
        advice = "give block sizes separated by commas, such as 4,8,16"
        sizes = tuple(sorted(set(read_list(arguments.sizes, "--sizes", read_count, advice))))
    if missing := [size for size in sizes if size not in setting.sizes]:
        held = ", ".join(map(str, setting.sizes))
        raise InputError(f"block size {missing[0]} is not in the traces; they hold {held}: collect with --sizes")
    given = {
        "input_size": len(train.traces[0].prefill.hidden) if arguments.inputs == "hidden" else setting.vocab_size,
        "sizes": sizes,
        "num_layers": arguments.layers,
    }
    config = PrefillConfig(**read_fields(PrefillConfig, arguments) | given)
    preferred = setting.trained_block_size if arguments.ties == "trained" else None
    facts |= {"ties": arguments.ties, "has_whole_inputs": train.traces[0].prefill.logits is not None}
    with show_counted("epochs") as report:
        pilot = train_prefill_pilot(
            train,
            config,
            PrefillTraining(num_epochs=arguments.epochs, seed=arguments.seed, preferred_size=preferred),
            device=arguments.device,
            report=lambda done, total: report("training the network", done, total),
        )
    with show_progress("writing the pilot"):
        _save(arguments.out, pilot, train, facts)
    return [pilot]


def _save(out: Path, pilots: Any, train: "TraceGroup", facts: dict[str, Any]) -> None:
    from blockpilot.pilots.files import save_pilot

    save_pilot(out, pilots, target=train.manifest["target"], drafter=train.manifest["drafter"], training=facts)


def _print_result(arguments: argparse.Namespace, facts: dict[str, Any], rows: "list[Row]") -> None:
    if arguments.json:
        print_json({"out": str(arguments.out), **facts, "rows": [asdict(row) for row in rows]})
        return
    columns = {
        "load": [row.load for row in rows],
        "method": [row.method for row in rows],
        "tau": [f"{row.tau:.2f}" for row in rows],
        "x plain": [f"{row.over_plain:.2f}" for row in rows],
        "x best fixed": [f"{row.over_best_fixed:.3f}" for row in rows],
        "95 %": [f"{row.interval[0]:.3f} to {row.interval[1]:.3f}" for row in rows],
        "tokens checked": [f"{row.verify_size:.1f}" for row in rows],
    }
    print_columns(columns)
    if errors := facts.get("calibration_error"):
        worst = max((task for task in errors if task != "all"), key=errors.__getitem__)
        print_note(f"calibration error {errors['all']:.3f} on held-out nodes, worst {errors[worst]:.3f} ({worst})")
    print_note(
        f"{facts['num_traces']} traces fitted, {facts['num_held_out']} held out; the pilot is in {arguments.out}"
    )
