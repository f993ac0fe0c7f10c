"""`blockpilot bench`: methods x tasks -> result rows.

What can be wrong with the command line and the prompt files is found before PyTorch is imported.
"""

import argparse
import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.bench.config import (
    KNOWN_METHODS,
    QUICK_METHODS,
    QUICK_PROMPTS,
    QUICK_TASKS,
    QUICK_TOKENS,
    SPLITS,
    BenchConfig,
)
from blockpilot.bench.tasks import TASKS, TaskPrompts, default_tasks, read_file, read_task
from blockpilot.cli.bench_table import print_table
from blockpilot.cli.console import print_json, print_note, show_counted, show_progress
from blockpilot.cli.ray_options import add_ray_arguments, check_ray, cluster_options
from blockpilot.core.config import EngineConfig, default_dtype, device_type
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.bench.methods import Method
    from blockpilot.bench.run import BenchResult
    from blockpilot.bench.site import BenchSetup

DEFAULT_TARGET = "smollm2-135m"
DEFAULTS = BenchConfig(tasks=("-",), methods=("ar",))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    out_help = "folder of the results; goes on with a run that is there (default: a new one under runs/)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    quick_help = f"a first table within three minutes on a CPU: {len(QUICK_TASKS)} tasks, {QUICK_PROMPTS} prompt each, "
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick_help}{QUICK_TOKENS} tokens, {len(QUICK_METHODS)} methods"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured and how long it may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object: rows and manifest")
    _add_work_arguments(parser.add_argument_group("what to measure"))
    _add_model_arguments(parser.add_argument_group("model"))
    add_ray_arguments(parser.add_argument_group("several devices"))


def _add_work_arguments(group: argparse._ArgumentGroup) -> None:
    tasks_help = f"{', '.join(TASKS)} (default: every set that is at hand)"
    group.add_argument("--tasks", metavar="NAME,...", help=tasks_help)
    methods_help = f"{KNOWN_METHODS}; ar is always measured (default: one or two of each kind)"
    group.add_argument("--methods", metavar="NAME,...", help=methods_help)
    data_help = "folder with the whole prompt sets (default: the subsets inside the package)"
    group.add_argument("--data", type=Path, metavar="DIR", help=data_help)
    prompts_help = "your own prompts, .jsonl or .txt; the task is named after the file; may be given more than once"
    group.add_argument("--prompts", type=Path, action="append", default=[], metavar="FILE", help=prompts_help)
    group.add_argument("--skip-bad", action="store_true", help="leave out malformed lines of prompt files")
    group.add_argument(
        "--split", choices=SPLITS, default="test", help="which prompts, by the rule on ids (default: test)"
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"per task; 0: all (default: {DEFAULTS.num_prompts})"
    )
    tokens_help = f"most tokens of an answer (default: {DEFAULTS.max_new_tokens})"
    group.add_argument("--max-new-tokens", type=int, metavar="N", help=tokens_help)
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling and of the order (default: 0)")
    group.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="times every prompt is measured (default: 1)"
    )
    group.add_argument("--concurrency", type=int, default=1, metavar="N", help="prompts answered at once (default: 1)")
    calibration_help = f"calibration prompts per task for best-fixed (default: {DEFAULTS.calibration_prompts})"
    group.add_argument(
        "--calibration-prompts", type=int, default=DEFAULTS.calibration_prompts, metavar="N", help=calibration_help
    )
    score_help = "run the programs of humaneval and mbpp answers, confined but on this machine"
    group.add_argument("--score-code", action="store_true", help=score_help)


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=f"default: {DEFAULT_TARGET}")
    drafter_help = "DFlash drafter: folder, hub id or shipped name (default: auto, the one that ships)"
    group.add_argument("--drafter", default="auto", metavar="MODEL", help=drafter_help)
    group.add_argument("--eagle3", default="auto", metavar="MODEL", help="EAGLE-3 drafter, likewise (default: auto)")
    group.add_argument("--pilot-file", type=Path, metavar="DIR", help="the trained pilot of the method blockpilot")
    group.add_argument("--profile", type=Path, metavar="FILE", help="step costs, written by `blockpilot profile`")
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    group.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.bench.methods import choose_drafters

    check_ray(arguments)
    dtype = arguments.dtype or default_dtype(arguments.device)
    EngineConfig(device=arguments.device, dtype=dtype)
    methods = _choose_methods(arguments)
    tasks = _read_tasks(arguments)
    config = _build_config(arguments, methods, tasks)
    given = {"dflash": arguments.drafter, "eagle3": arguments.eagle3}
    drafters = choose_drafters(methods, arguments.target, given)
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
        device=arguments.device,
        dtype=dtype,
        costs=arguments.profile,
        is_code_scored=arguments.score_code,
    )
    out = arguments.out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    work = _bench_here if arguments.ray is None else _bench_on_ray
    try:
        result = work(arguments, setup, out)
    except KeyboardInterrupt:
        print_note(f"what was measured is kept: the same command with --out {out} goes on")
        raise
    _print_result(result, out, is_json=arguments.json)
    return 0


def _bench_here(arguments: argparse.Namespace, setup: "BenchSetup", out: Path) -> "BenchResult":
    with show_progress(f"loading {arguments.target}") as progress:
        import torch

        from blockpilot.bench.run import run_bench
        from blockpilot.models.loading import load_target

        target = load_target(arguments.target, getattr(torch, setup.dtype), progress)
    with show_counted("answers") as report:
        return run_bench(dataclasses.replace(setup, target=target), out, report)


def _bench_on_ray(arguments: argparse.Namespace, setup: "BenchSetup", out: Path) -> "BenchResult":
    from blockpilot.integrations.ray.bench import bench_on_ray

    options = cluster_options(arguments)
    if options.device_type == "cpu":
        print_note("workers that share a CPU slow each other down: timings compare only with one worker per machine")
    with show_counted("answers") as report:
        return bench_on_ray(setup, options, out=out, report=report)


def _choose_methods(arguments: argparse.Namespace) -> "tuple[Method, ...]":
    from blockpilot.bench.methods import parse_methods

    names = _usual_methods(arguments) if arguments.methods is None else _split(arguments.methods, "--methods")
    return parse_methods(names, device=arguments.device, target=arguments.target, pilot_folder=arguments.pilot_file)


def _usual_methods(arguments: argparse.Namespace) -> list[str]:
    """Those of the defaults for which everything is at hand."""
    from blockpilot.bench.methods import DEFAULT_METHODS, PAPER, find_paper_pilot, shipped_of_kind

    names = list(QUICK_METHODS if arguments.quick else DEFAULT_METHODS)
    if PAPER in names and arguments.pilot_file is None:
        try:
            find_paper_pilot(arguments.target, None)
        except InputError as error:
            names.remove(PAPER)
            print_note(f"left out: {error}")
    if arguments.eagle3 == "auto" and shipped_of_kind("eagle3", arguments.target) is None:
        left_out = [name for name in names if name.startswith("eagle3")]
        names = [name for name in names if name not in left_out]
        reason = f"no EAGLE-3 drafter ships for {arguments.target}; give one with --eagle3"
        print_note(f"left out: {', '.join(left_out)}: {reason}")
    return names


def _read_tasks(arguments: argparse.Namespace) -> tuple[TaskPrompts, ...]:
    def skip(error: InputError) -> None:
        print_note(f"left out: {error}")

    skip_bad = skip if arguments.skip_bad else None
    if arguments.tasks is not None:
        names = _split(arguments.tasks, "--tasks")
    elif arguments.prompts:
        names = []
    else:
        names = list(QUICK_TASKS) if arguments.quick else list(default_tasks(arguments.data))
    tasks = [read_task(name, data=arguments.data, split=arguments.split, skip_bad=skip_bad) for name in names]
    tasks += [read_file(path, split=arguments.split, skip_bad=skip_bad) for path in arguments.prompts]
    found = [task.name for task in tasks]
    if repeated := next((name for name in found if found.count(name) > 1), None):
        raise InputError(f"two prompt files make the task {repeated!r}: rename one")
    return tuple(tasks)


def _build_config(
    arguments: argparse.Namespace, methods: "tuple[Method, ...]", tasks: tuple[TaskPrompts, ...]
) -> BenchConfig:
    def choose(given: int | None, quick: int, usual: int) -> int:
        return given if given is not None else quick if arguments.quick else usual

    return BenchConfig(
        tasks=tuple(task.name for task in tasks),
        methods=tuple(method.name for method in methods),
        num_prompts=choose(arguments.num_prompts, QUICK_PROMPTS, DEFAULTS.num_prompts),
        max_new_tokens=choose(arguments.max_new_tokens, QUICK_TOKENS, DEFAULTS.max_new_tokens),
        temperature=arguments.temperature,
        seed=arguments.seed,
        repeats=arguments.repeats,
        split=arguments.split,
        concurrency=arguments.concurrency,
        calibration_prompts=arguments.calibration_prompts,
    )


def _split(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f"{option} {text!r}: give names separated by commas")
    return list(dict.fromkeys(names))


def _print_plan(arguments: argparse.Namespace, config: BenchConfig, tasks: tuple[TaskPrompts, ...]) -> int:
    from blockpilot.bench.estimate import estimate, format_duration

    guess = estimate(tasks, config, arguments.device)
    counts = {task.name: len(task.prompts[: config.num_prompts or None]) for task in tasks}
    if arguments.json:
        print_json({"plan": dataclasses.asdict(config), "num_prompts": counts, **dataclasses.asdict(guess)})
        return 0
    print("tasks    " + ", ".join(f"{name} ({count})" for name, count in counts.items()))
    print("methods  " + ", ".join(config.methods))
    print(f"answers  {guess.num_answers:,} with up to {guess.num_tokens:,} tokens, {config.concurrency} at once")
    print(
        f"time     at most about {format_duration(guess.seconds)} if every method decodes "
        f"{guess.tokens_per_second:.0f} tokens/s"
    )
    return 0


def _print_result(result: "BenchResult", out: Path, *, is_json: bool) -> None:
    left_out: dict[str, Any] = result.manifest["left_out_tasks"]
    for task, reason in left_out.items():
        print_note(f"task {task} has no results: {reason}")
    if is_json:
        print_json({"out": str(out), "rows": result.rows, "manifest": result.manifest})
        return
    print_table(result.rows)
    print_note(f"results are in {out}; `blockpilot report {out}` draws them")
