"""Faults at random, many of them: `python -m tests.faults.run --count 500 --seed 0`.

Each is drawn from the seed and its number alone, so one that has failed is tried again by itself.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.faults.disk import KINDS
from tests.faults.site import VERBS, Site
from tests.faults.trial import draw_trial, run_trial

_REPORT_EVERY = 25


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb the long verbs at random places, and judge what comes of it.")
    parser.add_argument("--count", type=int, default=500, metavar="N", help="faults (default: 500)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first fault (default: 0)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        os.environ["BLOCKPILOT_CACHE"] = str(Path(name) / "cache")
        return run(Path(name), range(given.first, given.first + given.count), given.seed)


def run(folder: Path, numbers: range, seed: int) -> int:
    """Exit code 1 if anything went wrong."""
    site, started = Site(folder / "site"), time.monotonic()
    tried, failed = Counter[tuple[str, str]](), 0
    for done, number in enumerate(numbers, start=1):
        trial = draw_trial(random.Random(f"{seed}-{number}"), site)
        complaint = run_trial(site, trial, folder / "out" / trial.verb)
        shutil.rmtree(folder / "out", ignore_errors=True)
        tried[trial.verb, trial.kind] += 1
        if complaint is not None:
            failed += 1
            again = f"python -m tests.faults.run --seed {seed} --first {number} --count 1"
            say(f"FAILED {trial.verb}, {trial.faults}: {complaint}\n  again: {again}")
        if done % _REPORT_EVERY == 0 or done == len(numbers):
            say(f"{done} of {len(numbers)} faults, {failed} failed, {time.monotonic() - started:.0f} s")
    say("\n".join([_row("", KINDS), *(_row(verb, [tried[verb, kind] for kind in KINDS]) for verb in VERBS)]))
    return 1 if failed else 0


def _row(name: str, cells: "list[int] | tuple[str, ...]") -> str:
    return name.ljust(16) + "".join(str(cell).rjust(8) for cell in cells)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
