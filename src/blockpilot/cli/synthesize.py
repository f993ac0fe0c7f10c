"""`blockpilot synthesize`: the target writes its own training text."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from blockpilot.cli.console import print_json, show_progress
from blockpilot.core.errors import InputError

if TYPE_CHECKING:
    from blockpilot.training.synthesis import SynthesisConfig

DEFAULT_TARGET = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the shards; continues a run")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=f"default: {DEFAULT_TARGET}")
    parser.add_argument(
        "--num-prompts", type=int, default=4096, metavar="N", help="prompts to let the target write (default: 4096)"
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="TEXT",
        help="let written prompts begin so; several take turns, '' leaves it to the target",
    )
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help="further prompts: .txt or .jsonl, also .gz and .xz; repeatable",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="FILE",
        help="leave out prompts that share 13 words in a row with one of this file, such as a test set; repeatable",
    )
    parser.add_argument(
        "--temperatures",
        default="0,0,0,0.8",
        metavar="T,T,...",
        help="each answer draws one of these (default: 0,0,0,0.8)",
    )
    parser.add_argument(
        "--max-length", type=int, default=448, metavar="N", help="tokens of prompt and answer (default: 448)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="texts written side by side (default: 64 on a CPU, 2048 on a GPU)",
    )
    parser.add_argument("--shard-size", type=int, default=16384, metavar="N", help="prompts per shard (default: 16384)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.training.manifests import read_manifest
    from blockpilot.training.setup import load_training_target
    from blockpilot.training.synthesis import synthesize

    config = _config(arguments)
    with show_progress("loading the target") as progress:
        target = load_training_target(
            arguments.target, device=arguments.device, dtype=arguments.dtype, progress=progress
        )
    synthesize(config, target, arguments.out, ProgressLines())
    manifest = read_manifest(arguments.out) or {}
    counts = {key: manifest[key] for key in ("num_texts", "num_answer_tokens", "num_shards")}
    if arguments.json:
        print_json({"out": str(arguments.out), **counts})
    else:
        print(f"{counts['num_texts']:,} texts with {counts['num_answer_tokens']:,} answer tokens in {arguments.out}")
    return 0


def _config(arguments: argparse.Namespace) -> "SynthesisConfig":
    from blockpilot.training.synthesis import SynthesisConfig

    if not arguments.num_prompts and not arguments.prompts:
        raise InputError("nothing to answer: give --num-prompts or --prompts FILE")
    default_rows = 2048 if arguments.device.startswith("cuda") else 64
    return SynthesisConfig(
        target=arguments.target,
        num_written=_at_least(arguments.num_prompts, 0, "--num-prompts"),
        starts=tuple(arguments.start) or ("",),
        prompt_files=tuple(arguments.prompts),
        excluded_files=tuple(arguments.exclude),
        temperatures=_parse_temperatures(arguments.temperatures),
        max_length=_at_least(arguments.max_length, 32, "--max-length"),
        max_prompt_length=arguments.max_length // 2,
        num_rows=_at_least(arguments.rows, 0, "--rows") or default_rows,
        shard_size=_at_least(arguments.shard_size, 1, "--shard-size"),
        seed=_at_least(arguments.seed, 0, "--seed"),
    )


def _parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--temperatures {text!r}: give numbers separated by commas") from error
    if any(not 0 <= value < 10 for value in values):
        raise InputError(f"--temperatures {text!r}: temperatures lie between 0 and 10")
    return values


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    return value


class ProgressLines:
    """One line every few seconds: long work stays visible in terminals and logs alike."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds, self.last = seconds, float("-inf")

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self.last > self.seconds:
            self.last = now
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)
