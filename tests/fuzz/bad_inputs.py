"""Bad inputs to every verb, drawn at random: `python -m tests.fuzz.bad_inputs --count 2000 --seed 0`.

No bad input may end in a traceback, take long or fill the memory. Exit code 1 where one does: what it was given is
kept, and the summary names the command that draws it again.
"""

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

_LEFT_OUT = ("blockpilot.gpu.kernels", "blockpilot.integrations", "blockpilot.__main__")  # need what is not here
_SETTINGS = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_SECONDS_BETWEEN_LINES = 10.0


def main() -> int:
    arguments = _read_arguments()
    os.environ |= _SETTINGS
    base = Path(tempfile.mkdtemp(prefix="bad-inputs-"))
    world, cases = base / "world", base / "cases"
    os.environ["BLOCKPILOT_CACHE"] = str(world / "cache")
    _import_everything()
    _make_world_elsewhere(world)
    numbers = [arguments.only] if arguments.only is not None else list(range(arguments.count))
    outcomes = _run_all(world, cases, numbers, arguments)
    faults = [one for one in outcomes if one.fault]
    _print_summary(outcomes, arguments, cases)
    if not faults and arguments.only is None:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if faults else 0


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", type=int, metavar="N", help="the input of this number alone; its files are kept")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    return parser.parse_args()


def _import_everything() -> None:
    """Before any fork, so that no child has to."""
    import blockpilot

    for module in pkgutil.walk_packages(blockpilot.__path__, "blockpilot."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
    for name in ("matplotlib.figure", "huggingface_hub", "rich.console", "rich.table", "tests.fuzz.children"):
        importlib.import_module(name)


def _make_world_elsewhere(world: Path) -> None:
    """In a child, whose threads end with it; what verbs say while it is made is shown only if it fails."""
    log = world.with_suffix(".log")
    process = multiprocessing.get_context("fork").Process(target=_make_world, args=(world, log))
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"the good inputs could not be made:\n{log.read_text(encoding='utf-8')}")


def _make_world(world: Path, log: Path) -> None:
    import torch

    from tests.fuzz.world import make_world

    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    make_world(world)


def _run_all(world: Path, cases: Path, numbers: list[int], arguments: argparse.Namespace) -> list:
    from tests.fuzz.children import command_of

    outcomes, last = [], time.monotonic()
    work = partial(_run_one, world, cases, arguments.seed)
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for outcome in pool.imap_unordered(work, numbers):
            outcomes.append(outcome)
            if outcome.fault:
                print(f"input {outcome.number}: {outcome.fault}\n    {command_of(outcome.words)[:1000]}", flush=True)
                print("".join(f"    after: {deed}\n" for deed in outcome.deeds), end="", flush=True)
            if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{len(outcomes):,} of {len(numbers):,} inputs", flush=True)
    return outcomes


def _run_one(world: Path, cases: Path, seed: int, number: int) -> object:
    from tests.fuzz.children import run_case

    return run_case(world, cases / str(number), seed=seed, number=number)


def _print_summary(outcomes: list, arguments: argparse.Namespace, cases: Path) -> None:
    counts = Counter((one.verb, one.exit_code) for one in outcomes)
    codes = sorted({code for _, code in counts})
    print(f"\n{'verb':16}" + "".join(f"{f'exit {code}':>10}" for code in codes))
    for verb in sorted({verb for verb, _ in counts}):
        print(f"{verb:16}" + "".join(f"{counts[verb, code]:10}" for code in codes))
    refused = [one for one in outcomes if one.exit_code == 2]
    if refused:
        slowest, largest = max(refused, key=lambda one: one.seconds), max(outcomes, key=lambda one: one.megabytes)
        print(f"slowest refusal {slowest.seconds:.2f} s (input {slowest.number}, {slowest.verb})")
        print(f"largest memory {largest.megabytes:.0f} MB (input {largest.number}, {largest.verb})")
    faults = sorted((one for one in outcomes if one.fault), key=lambda one: one.number)
    print(f"{len(outcomes):,} inputs, seed {arguments.seed}: {len(faults)} faults")
    for one in faults:
        print(f"{one.fault}\n    python -m tests.fuzz.bad_inputs --seed {arguments.seed} --only {one.number}")
        print(f"    kept: {cases / str(one.number)}")


if __name__ == "__main__":
    sys.exit(main())
