"""`blockpilot probe`: check on your own machine and model that a token's logits are the same bits in all passes.

Exit code 1 where they are not; the first operation that differs is named.
"""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from blockpilot.cli.console import print_columns, print_json, print_note, show_counted, show_progress
from blockpilot.cli.options import add_option, add_target_options, read_engine_config
from blockpilot.core.config import device_type
from blockpilot.core.errors import InputError, require_at_least, require_at_most

if TYPE_CHECKING:
    from blockpilot.decoding.probe import ProbeReport
    from blockpilot.engine.llm import LLM

_BATCH_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_options(parser)
    add_option(parser, "--batch-size", _BATCH_SIZE, "most requests in one pass")
    add_option(parser, "--seed", 0, "of the random tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    require_at_least(arguments, batch_size=1)
    require_at_most(arguments, batch_size=1024)
    llm = _load(arguments)
    with show_counted("stages") as report:
        found = llm.probe(report, seed=arguments.seed)
    if arguments.json:
        names = {"target": llm.target_name, "device": llm.config.device, "dtype": llm.config.dtype}
        print_json({**names, "seed": arguments.seed, **found.to_dict()})
    else:
        _print(found)
    return 0 if found.difference is None else 1


def _load(arguments: argparse.Namespace) -> "LLM":
    """An engine whose slots have room for the probe and no more."""
    config = read_engine_config(arguments, num_slots=arguments.batch_size)
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.core.device import resolve_device, torch_dtype
        from blockpilot.decoding.probe import ProbeSizes
        from blockpilot.engine.llm import LLM, why_inexact
        from blockpilot.models.loading import load_target

        is_cpu = device_type(config.device) == "cpu"
        if is_cpu and config.dtype not in ("auto", "int8"):
            raise InputError(why_inexact("cpu", config.dtype))
        resolve_device(config.device)
        target = load_target(arguments.target, torch_dtype(config.dtype), progress, quantize=config.quantize)
        if is_cpu and config.dtype == "auto" and str(target.dtype) != "torch.int8":
            raise InputError(why_inexact("cpu", str(target.dtype).removeprefix("torch.")))
        length = min(ProbeSizes().text, target.decoder.config.context_length)
        return LLM(target, drafter=None, pilot="ar", config=replace(config, context_length=length))


def _print(found: "ProbeReport") -> None:
    rows = [(kind, counts.cases, counts.rows, counts.differing) for kind, counts in found.kinds.items()]
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    print_columns(dict(zip(("what", "cases", "rows", "differing"), zip(*cells, strict=True), strict=True)))
    if found.difference is None:
        print(f"{found.num_rows:,} logit rows, bit for bit the same")
    else:
        print(f"{found.num_differing:,} of {found.num_rows:,} rows differ. First: {found.difference}")
    if found.num_not_finite:
        print_note(f"{found.num_not_finite:,} plain rows hold infinities or NaN, which say little: try another dtype")
