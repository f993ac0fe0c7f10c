"""`blockpilot synthesize`: the target writes its own training text."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.cli.console import ProgressLines, print_columns, print_result, show_progress
from blockpilot.cli.options import add_option, add_target_options, read_list
from blockpilot.core.errors import InputError, require_at_least, require_at_most
from blockpilot.core.locks import command_name, hold_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the shards; continues a run")
    add_target_options(parser, has_integers=False)
    add_option(parser, "--num-prompts", 4096, "prompts to let the target write")
    start_help = "let written prompts begin so; several take turns, '' leaves it to the target"
    add("--start", action="append", default=[], metavar="TEXT", help=start_help)
    prompts_help = "further prompts: .txt or .jsonl, also .gz and .xz; repeatable"
    add_option(parser, "--tasks", 0, "prompts to make from task templates and texts that the target writes for them")
    templates_help = "task templates (JSON; default: those that ship, see docs/training.md)"
    add("--templates", type=Path, metavar="FILE", help=templates_help)
    add("--prompts", action="append", default=[], metavar="FILE", help=prompts_help)
    add_option(parser, "--answers", 1, "answers to each prompt of a file; those after the first are sampled")
    exclude_help = "leave out prompts that share 13 words in a row with one of this file (a test set); repeatable"
    add("--exclude", action="append", default=[], metavar="FILE", help=exclude_help)
    add_option(parser, "--temperatures", "0,0,0,0.8", "each answer draws one of these", metavar="T,T,...")
    add_option(parser, "--max-length", 448, "tokens of prompt and answer; prompts get at most three quarters of them")
    add_option(parser, "--max-answer", 600, "tokens of an answer; tasks have limits of their own")
    rows_help = "texts written side by side, fewer if they exceed 512 tokens (default: 64 on a CPU, 2048 on a GPU)"
    add("--rows", type=int, default=0, metavar="N", help=rows_help)
    add_option(parser, "--shard-size", 16384, "prompts per shard")
    add_option(parser, "--seed", 0)
    add("--json", action="store_true", help="print one JSON object at the end")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.core.manifests import read_manifest
    from blockpilot.training.setup import load_training_target
    from blockpilot.training.synthesis import SynthesisConfig, synthesize
    from blockpilot.training.templates import SHIPPED, Templates

    if not (arguments.num_prompts or arguments.prompts or arguments.tasks):
        raise InputError("nothing to answer: give --num-prompts, --tasks or --prompts FILE")
    if arguments.templates is not None and not arguments.tasks:
        raise InputError("--templates without a number of prompts to make of them: give --tasks N, too")
    require_at_least(
        arguments, num_prompts=0, tasks=0, max_length=32, max_answer=8, answers=1, rows=0, shard_size=1, seed=0
    )
    bounds = {"num_prompts": 2**27, "tasks": 2**24, "max_length": 2**16, "max_answer": 2**16, "rows": 2**16}
    bounds["answers"] = 2**10
    require_at_most(arguments, **bounds, shard_size=2**20, seed=2**31 - 1)
    templates = Templates.read(arguments.templates or SHIPPED) if arguments.tasks else None
    config = SynthesisConfig(
        target=arguments.target,
        num_written=arguments.num_prompts,
        starts=tuple(arguments.start) or ("",),
        prompt_files=tuple(arguments.prompts),
        excluded_files=tuple(arguments.exclude),
        num_answers=arguments.answers,
        num_tasks=arguments.tasks,
        temperatures=_read_temperatures(arguments.temperatures),
        max_length=arguments.max_length,
        max_prompt_length=arguments.max_length * 3 // 4,
        max_answer_length=arguments.max_answer,
        num_rows=arguments.rows or (2048 if arguments.device.startswith("cuda") else 64),
        shard_size=arguments.shard_size,
        seed=arguments.seed,
    )
    with hold_folder(arguments.out, command_name()):
        with show_progress("loading the target") as progress:
            target = load_training_target(
                arguments.target, device=arguments.device, dtype=arguments.dtype, progress=progress
            )
        synthesize(config, target, arguments.out, ProgressLines(), templates)
        manifest = read_manifest(arguments.out) or {}
    _show(arguments, manifest)
    return 0


def _show(arguments: argparse.Namespace, manifest: Mapping[str, Any]) -> None:
    """How much there is of what; on standard error, which tasks the target could not follow."""
    from blockpilot.training.synthesis import tasks_that_failed

    counts = {key: manifest[key] for key in ("num_texts", "num_answer_tokens", "num_shards", "mix")}
    for name in tasks_that_failed(manifest["mix"]):
        line = f"warning: task {name!r} gave nearly no text: the target's answers are too short, or repeat themselves"
        print(line, file=sys.stderr)
    if not arguments.json and arguments.tasks:
        mix = manifest["mix"]
        titles = {"source": "source", "prompts": "prompts", "texts": "texts", "answer_tokens": "answer tokens"}
        titles |= {"mean_prompt": "mean prompt", "mean_answer": "mean answer"}
        print_columns({title: [_cell(row[key]) for row in mix] for key, title in titles.items()})
    line = f"{counts['num_texts']:,} texts with {counts['num_answer_tokens']:,} answer tokens in {arguments.out}"
    print_result({"out": str(arguments.out), **counts}, line, is_json=arguments.json)


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.0f}"


def _read_temperatures(text: str) -> tuple[float, ...]:
    values = tuple(read_list(text, "--temperatures", float, "give numbers separated by commas"))
    if any(not 0 <= value < 10 for value in values):
        raise InputError(f"--temperatures {text!r}: temperatures lie between 0 and 10")
    return values
