"""`blockpilot train-drafter`: training text in, drafter out."""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from blockpilot.cli.console import print_result, show_progress
from blockpilot.cli.options import Options, add_option, add_target_options, read_count, read_fields, read_list
from blockpilot.core.locks import command_name, hold_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder written by `blockpilot synthesize`")
    add("--out", type=Path, required=True, metavar="DIR", help="checkpoints, log and the drafter; continues a run")
    add_target_options(parser, device_help="cpu or cuda; several GPUs: start with torchrun", has_integers=False)
    add_option(parser, "--kind", "dflash", choices=("dflash", "dflash2", "eagle3"))
    add("--no-compile", action="store_true", help="run the step without torch.compile")
    add("--json", action="store_true", help="print one JSON object at the end")
    group = parser.add_argument_group("drafter")
    add_option(group, "--layers", 3, "draft layers")
    add_option(group, "--taps", "5", "how many target layers to read, or which", metavar="N|I,I,...")
    add_option(group, "--block-size", 16, metavar="B")
    group.add_argument("--intermediate-size", type=int, metavar="N", help="default: the target's")
    add_option(group, "--selector-rank", 32, "dflash2", metavar="R")
    add_option(group, "--unrolled", 7, "eagle3: steps of training-time test")
    head_help = "look only at the N most used tokens (default: all; eagle3: 4096)"
    group.add_argument("--head-size", type=int, default=0, metavar="N", help=head_help)
    _add_loop(parser.add_argument_group("training"))


def _add_loop(group: Options) -> None:
    group.add_argument("--start-from", metavar="DIR", help="start with the weights of this drafter of the same shape")
    add_option(group, "--steps", 2000)
    add_option(group, "--batch-size", 64, "texts per step, all processes together")
    add_option(group, "--width", 448, "tokens of a text, places in a batch")
    width_help = "longer texts are cut here; texts of similar length go together (default: --width)"
    group.add_argument("--max-width", type=int, default=0, metavar="N", help=width_help)
    add_option(group, "--blocks", 32, "anchors per text of --width tokens")
    mixed_help = "below --block-size: mixed sizes (default: off)"
    group.add_argument("--min-block-size", type=int, default=0, metavar="B", help=mixed_help)
    add_option(group, "--learning-rate", 1.5e-3)
    add_option(group, "--optimizer", "adamw", choices=("adamw", "muon"))
    add_option(group, "--position-weights", "exponential", choices=("exponential", "d-pace"))
    add_option(group, "--gamma", 7.0, "decay of exponential weights")
    add_option(group, "--labels", "data", choices=("data", "argmax"))
    add_option(group, "--seed", 0)
    group.add_argument("--evaluate-every", type=int, default=0, metavar="N", help="default: only at the end")
    add_option(group, "--checkpoint-every", 500)
    limit_help = "train on the first N texts only (default: all)"
    group.add_argument("--limit-texts", type=int, default=0, metavar="N", help=limit_help)


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.training.drafter_run import DrafterRun
    from blockpilot.training.setup import load_training_target, train_drafter

    given = {  # the other options are named like the fields of the run
        "taps": _read_taps(arguments.taps),
        "min_block_size": arguments.min_block_size or arguments.block_size,
        "is_compiled": not arguments.no_compile and arguments.device.startswith("cuda"),
    }
    settings = DrafterRun(**read_fields(DrafterRun, arguments) | given)
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun: the first process speaks for all
    with hold_folder(arguments.out, command_name()) if is_first else contextlib.nullcontext():
        with show_progress("loading the target") as progress:
            target = load_training_target(
                arguments.target, device=arguments.device, dtype=arguments.dtype, progress=progress
            )
        summary = train_drafter(settings, target, data=arguments.data, out=arguments.out, report=_print_row)
    if is_first:
        print_result(summary, f"the drafter is in {summary['drafter']}", is_json=arguments.json)
    return 0


def _print_row(row: dict[str, Any]) -> None:
    if (evaluation := row.get("evaluation")) is not None:
        shown = {name: round(value, 3) for name, value in evaluation.items() if isinstance(value, float)}
        text = f"held-out {shown}"
    else:
        text = f"loss {row['loss']:.3f}, emitted {row['emitted']:.3f}, {row['steps_per_second']:.1f} steps/s"
    print(f"step {row['step']}: {text}", file=sys.stderr, flush=True)


def _read_taps(text: str) -> tuple[int, ...] | int:
    """A single number is a count."""
    advice = "give a count, or layer numbers separated by commas"
    layers = read_list(text, "--taps", lambda part: read_count(part.strip()), advice)
    return layers[0] if len(layers) == 1 else tuple(layers)
