"""`blockpilot bench`: methods x tasks -> result rows.

What can be wrong with the command line and the prompt files is found before PyTorch is imported.
"""

import argparse
import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.bench.config import KNOWN_METHODS, QUICK, BenchConfig, estimate
from blockpilot.bench.reference import read_reference
from blockpilot.bench.tasks import TASKS, TaskPrompts, default_tasks, read_file, read_task
from blockpilot.cli import options
from blockpilot.cli.console import make_table, print_json, print_note, print_table, show_counted, show_progress
from blockpilot.core.config import device_type
from blockpilot.core.errors import InputError
from blockpilot.core.locks import command_name, hold_folder
from blockpilot.core.progress import format_duration
from blockpilot.report.run_data import Run
from blockpilot.report.tables import Cell, results_table
from blockpilot.text.prompts import SPLITS

if TYPE_CHECKING:
    from blockpilot.bench.run import BenchResult
    from blockpilot.bench.site import BenchSetup

_DEFAULTS = BenchConfig(tasks=("-",), methods=("ar",))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    out_help = "folder of the results; goes on with a run that is there (default: a new one under runs/)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    quick_help = f"a first table within three minutes on a CPU: {len(QUICK.tasks)} tasks, {QUICK.num_prompts} prompt "
    quick_help += f"each, {QUICK.max_new_tokens} tokens, {len(QUICK.methods)} methods"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured and how long it may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object: rows and manifest")
    reference_help = (
        "folder of an earlier run with one request at a time: all answers are compared with its plain ones "
    )
    reference_help += "(default: with the plain answers of this run)"
    parser.add_argument("--reference", type=Path, metavar="DIR", help=reference_help)
    _add_work_options(parser.add_argument_group("what to measure"))
    group = parser.add_argument_group("model")
    options.add_target_options(group, "DFlash drafter: folder, hub id or shipped name")
    options.add_option(group, "--eagle3", "auto", "EAGLE-3 drafter, likewise", metavar="MODEL")
    group.add_argument("--pilot-file", type=Path, metavar="DIR", help="the trained pilot of the method blockpilot")
    group.add_argument("--profile", type=Path, metavar="FILE", help="step costs, written by `blockpilot profile`")
    options.add_ray_options(parser.add_argument_group("several devices"))


def _add_work_options(group: options.Options) -> None:
    add = group.add_argument
    add("--tasks", metavar="NAME,...", help=f"{', '.join(TASKS)} (default: every set that is at hand)")
    methods_help = f"{KNOWN_METHODS}; ar is always measured (default: one or two of each kind)"
    add("--methods", metavar="NAME,...", help=methods_help)
    data_help = "folder with the whole prompt sets (default: the subsets inside the package)"
    add("--data", type=Path, metavar="DIR", help=data_help)
    prompts_help = "your own prompts, .jsonl or .txt; the task is named after the file; may be given more than once"
    add("--prompts", type=Path, action="append", default=[], metavar="FILE", help=prompts_help)
    add("--skip-bad", action="store_true", help="leave out malformed lines of prompt files")
    options.add_option(group, "--split", _DEFAULTS.split, "which prompts, by the rule on ids", choices=SPLITS)
    add("--num-prompts", type=int, metavar="N", help=f"per task; 0: all (default: {_DEFAULTS.num_prompts})")
    tokens_help = f"most tokens of an answer (default: {_DEFAULTS.max_new_tokens})"
    add("--max-new-tokens", type=int, metavar="N", help=tokens_help)
    options.add_option(group, "--temperature", _DEFAULTS.temperature, "0 is greedy", metavar="T")
    options.add_option(group, "--seed", _DEFAULTS.seed, "of sampling and of the order")
    options.add_option(group, "--repeats", _DEFAULTS.repeats, "times every prompt is measured")
    options.add_option(group, "--concurrency", _DEFAULTS.concurrency, "prompts answered at once")
    budget_help = "prompt tokens of one pass; longer prompts are read in pieces (default: a whole batch at once)"
    shapes_help = "block sizes that a GPU runs as they are, not rounded up to a recorded shape, such as 14-18"
    options.add_option(group, "--own-shapes", "", shapes_help, metavar="B,...")
    add("--token-budget", type=int, metavar="N", help=budget_help)
    calibration_help = "calibration prompts per task for best-fixed and best-fixed-tree"
    options.add_option(group, "--calibration-prompts", _DEFAULTS.calibration_prompts, calibration_help)
    score_help = "run the programs of humaneval and mbpp answers, confined but on this machine"
    add("--score-code", action="store_true", help=score_help)


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.bench.methods import choose_drafters, parse_methods

    options.check_ray(arguments)
    own_shapes = options.read_sizes(arguments.own_shapes, "--own-shapes")
    engine_config = options.read_engine_config(arguments, own_shapes=own_shapes)
    names = _usual_methods(arguments) if arguments.methods is None else _read_names(arguments.methods, "--methods")
    methods = parse_methods(names, device=arguments.device, target=arguments.target, pilot_folder=arguments.pilot_file)
    tasks = _read_tasks(arguments)
    given = {name: value for name, value in options.read_fields(BenchConfig, arguments).items() if value is not None}
    given |= {"tasks": tuple(task.name for task in tasks), "methods": tuple(method.name for method in methods)}
    config = dataclasses.replace(QUICK if arguments.quick else _DEFAULTS, **given)
    reference = None if arguments.reference is None else read_reference(arguments.reference)
    drafters = choose_drafters(methods, arguments.target, {"dflash": arguments.drafter, "eagle3": arguments.eagle3})
    if device_type(arguments.device) == "cuda" and arguments.ray is None:  # with Ray the workers have the GPUs
        from blockpilot.core.device import resolve_device

        resolve_device(arguments.device)
    if arguments.dry_run:
        return _print_plan(arguments, config, tasks)
    from blockpilot.bench.site import BenchSetup

    setup = BenchSetup(
        config=config,
        methods=methods,
        tasks=tasks,
        target=arguments.target,
        drafters=drafters,
        engine=engine_config,
        costs=arguments.profile,
        is_code_scored=arguments.score_code,
        reference=reference,
    )
    out = arguments.out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    work = _bench_here if arguments.ray is None else _bench_on_ray
    try:
        with hold_folder(out, command_name()):
            result = work(arguments, setup, out)
    except KeyboardInterrupt:
        print_note(f"what was measured is kept: the same command with --out {out} goes on")
        raise
    _print_result(result, out, is_json=arguments.json)
    return 0


def _bench_here(arguments: argparse.Namespace, setup: "BenchSetup", out: Path) -> "BenchResult":
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.bench.run import run_bench
        from blockpilot.core.device import torch_dtype
        from blockpilot.models.loading import load_target

        target = load_target(
            arguments.target, torch_dtype(setup.engine.dtype), progress, quantize=setup.engine.quantize
        )
    with show_counted("answers") as report:
        return run_bench(dataclasses.replace(setup, target=target), out, report)


def _bench_on_ray(arguments: argparse.Namespace, setup: "BenchSetup", out: Path) -> "BenchResult":
    from blockpilot.integrations.ray.bench import bench_on_ray

    cluster = options.cluster_options(arguments)
    if cluster.device_type == "cpu":
        print_note("workers that share a CPU slow each other down: timings compare only with one worker per machine")
    with show_counted("answers") as report:
        return bench_on_ray(setup, cluster, out=out, report=report)


def _usual_methods(arguments: argparse.Namespace) -> list[str]:
    """Those of the defaults for which everything is at hand."""
    from blockpilot.bench.methods import DEFAULT_METHODS, PAPER, find_paper_pilot, shipped_of_kind

    names = list(QUICK.methods if arguments.quick else DEFAULT_METHODS)
    if PAPER in names and arguments.pilot_file is None:
        try:
            find_paper_pilot(arguments.target, None)
        except InputError as error:
            names.remove(PAPER)
            print_note(f"left out: {error}")
    if arguments.eagle3 == "auto" and shipped_of_kind("eagle3", arguments.target) is None:
        left_out = [name for name in names if name.startswith("eagle3")]
        names = [name for name in names if name not in left_out]
        named = ", ".join(left_out)
        print_note(f"left out: {named}: no EAGLE-3 drafter ships for {arguments.target}; give one with --eagle3")
    return names


def _read_tasks(arguments: argparse.Namespace) -> tuple[TaskPrompts, ...]:
    skip_bad = (lambda error: print_note(f"left out: {error}")) if arguments.skip_bad else None
    if arguments.tasks is not None:
        names = _read_names(arguments.tasks, "--tasks")
    elif arguments.prompts:
        names = []
    else:
        names = list(QUICK.tasks if arguments.quick else default_tasks(arguments.data))
    tasks = [read_task(name, data=arguments.data, split=arguments.split, skip_bad=skip_bad) for name in names]
    tasks += [read_file(path, split=arguments.split, skip_bad=skip_bad) for path in arguments.prompts]
    found = [task.name for task in tasks]
    if repeated := next((name for name in found if found.count(name) > 1), None):
        raise InputError(f"two prompt files make the task {repeated!r}: rename one")
    return tuple(tasks)


def _read_names(text: str, flag: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InputError(f"{flag} {text!r}: give names separated by commas")
    return list(dict.fromkeys(names))


def _print_plan(arguments: argparse.Namespace, config: BenchConfig, tasks: tuple[TaskPrompts, ...]) -> int:
    guess = estimate(tasks, config, arguments.device)
    counts = {task.name: len(task.prompts[: config.num_prompts or None]) for task in tasks}
    if arguments.json:
        print_json({"plan": dataclasses.asdict(config), "num_prompts": counts, **guess})
        return 0
    print("tasks    " + ", ".join(f"{name} ({count})" for name, count in counts.items()))
    print("methods  " + ", ".join(config.methods))
    print(f"answers  {guess['num_answers']:,} with up to {guess['num_tokens']:,} tokens, {config.concurrency} at once")
    print(
        f"time     at most about {format_duration(guess['seconds'])} if every method decodes "
        f"{guess['tokens_per_second']:.0f} tokens/s"
    )
    return 0


def _print_result(result: "BenchResult", out: Path, *, is_json: bool) -> None:
    for task, reason in result.manifest["left_out_tasks"].items():
        print_note(f"task {task} has no results: {reason}")
    if is_json:
        print_json({"out": str(out), "rows": result.rows, "manifest": result.manifest})
        return
    _print_rows(result.rows)
    print_note(f"results are in {out}; `blockpilot report {out}` draws them")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Methods down, tasks across, speedup and tau in each cell; the best of each column is bold."""
    run = Run("", {}, rows, [], [])
    table = make_table()
    table.add_column("method", no_wrap=True)
    for task in run.columns:
        table.add_column(f"{task}\nspeedup  tau", justify="right", no_wrap=True)
    for label, *cells in results_table(run).rows:
        pairs = zip(cells[::2], cells[1::2], strict=True)
        table.add_row(label.text, *(f"{_show(speedup, 7)} {_show(tau, 4)}" for speedup, tau in pairs))
    single = [row for row in rows if row["task"] != "mean"]
    mismatches, near_ties = (sum(row[name] for row in single) for name in ("mismatches", "near_ties"))
    num_prompts = sum(row["num_prompts"] for row in run.of_method("ar"))
    footer = f"speedup: decode tokens/s over plain decoding; tau: tokens per step; {num_prompts} prompts; "
    print_table(table, f"{footer}{mismatches} mismatches, {near_ties} near-ties")


def _show(cell: Cell, width: int) -> str:
    text = cell.text.removesuffix("x").rjust(width)
    return f"[bold]{text}[/bold]" if cell.is_best else text
