"""`blockpilot train-drafter`: training text in, drafter out."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import print_json, show_progress
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.training.drafter_run import DrafterRun

DEFAULT_TARGET = "smollm2-135m"
KINDS = ("dflash", "dflash2", "eagle3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder written by `blockpilot synthesize`"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="checkpoints, log and the drafter; continues a run"
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=f"default: {DEFAULT_TARGET}")
    parser.add_argument("--kind", choices=KINDS, default="dflash", help="default: dflash")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu); several GPUs: start with torchrun")
    parser.add_argument("--dtype", default=None, help="of the target; default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--no-compile", action="store_true", help="run the step without torch.compile")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_shape(parser.add_argument_group("drafter"))
    _add_loop(parser.add_argument_group("training"))


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layers", type=int, default=3, metavar="N", help="draft layers (default: 3)")
    group.add_argument(
        "--taps", default="5", metavar="N|I,I,...", help="how many target layers to read, or which (default: 5)"
    )
    group.add_argument("--block-size", type=int, default=16, metavar="B", help="default: 16")
    group.add_argument("--intermediate-size", type=int, default=None, metavar="N", help="default: the target's")
    group.add_argument("--selector-rank", type=int, default=32, metavar="R", help="dflash2 (default: 32)")
    group.add_argument(
        "--unrolled", type=int, default=7, metavar="N", help="eagle3: steps of training-time test (default: 7)"
    )
    group.add_argument(
        "--head-size",
        type=int,
        default=0,
        metavar="N",
        help="look only at the N most used tokens (default: all; eagle3: 4096)",
    )


def _add_loop(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--start-from", metavar="DIR", help="start with the weights of this drafter of the same shape")
    group.add_argument("--steps", type=int, default=2000, metavar="N", help="default: 2000")
    group.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="texts per step, all processes together (default: 64)"
    )
    group.add_argument("--width", type=int, default=448, metavar="N", help="texts are cut here (default: 448)")
    group.add_argument("--blocks", type=int, default=32, metavar="N", help="anchors per text (default: 32)")
    group.add_argument(
        "--min-block-size", type=int, default=0, metavar="B", help="below --block-size: mixed sizes (default: off)"
    )
    group.add_argument("--learning-rate", type=float, default=1.5e-3, metavar="X", help="default: 1.5e-3")
    group.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="default: adamw")
    group.add_argument(
        "--position-weights", choices=("exponential", "d-pace"), default="exponential", help="default: exponential"
    )
    group.add_argument(
        "--gamma", type=float, default=7.0, metavar="X", help="decay of exponential weights (default: 7)"
    )
    group.add_argument("--labels", choices=("data", "argmax"), default="data", help="default: data")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--evaluate-every", type=int, default=0, metavar="N", help="default: only at the end")
    group.add_argument("--checkpoint-every", type=int, default=500, metavar="N", help="default: 500")
    group.add_argument(
        "--limit-texts", type=int, default=0, metavar="N", help="train on the first N texts only (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.training.setup import load_training_target, train_drafter

    settings = _settings(arguments)
    with show_progress("loading the target") as progress:
        target = load_training_target(
            arguments.target, device=arguments.device, dtype=arguments.dtype, progress=progress
        )
    summary = train_drafter(settings, target, data=arguments.data, out=arguments.out, report=_print_row)
    if int(os.environ.get("RANK", "0")):
        return 0  # torchrun: the first process speaks for all
    if arguments.json:
        print_json(summary)
    else:
        print(f"the drafter is in {summary['drafter']}")
    return 0


def _settings(arguments: argparse.Namespace) -> "DrafterRun":
    """Arguments carry the names of the run's fields, but for those that need a word more."""
    from blockpilot.training.drafter_run import DrafterRun

    given = {key: value for key, value in vars(arguments).items() if key in DrafterRun.__dataclass_fields__}
    given["taps"] = _parse_taps(arguments.taps)
    given["min_block_size"] = arguments.min_block_size or arguments.block_size
    given["is_compiled"] = not arguments.no_compile and arguments.device.startswith("cuda")
    return DrafterRun(**given)


def _print_row(row: dict[str, Any]) -> None:
    evaluation = row.get("evaluation")
    if evaluation is not None:
        shown = {name: round(value, 3) for name, value in evaluation.items() if isinstance(value, float)}
        print(f"step {row['step']}: held-out {shown}", file=sys.stderr, flush=True)
    else:
        text = f"loss {row['loss']:.3f}, emitted {row['emitted']:.3f}, {row['steps_per_second']:.1f} steps/s"
        print(f"step {row['step']}: {text}", file=sys.stderr, flush=True)


def _parse_taps(text: str) -> tuple[int, ...] | int:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--taps {text!r}: give a count, or layer numbers separated by commas")
    return int(text) if len(parts) == 1 else tuple(int(part) for part in parts)
