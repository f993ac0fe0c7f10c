"""The BlockPilot paper's experiments on our own traces: one block size per request, chosen after prefill.

    python studies/pilot_experiments.py --train DIR ... --test DIR ... [--out DIR] [--device cuda] [--part PART]
    python studies/pilot_experiments.py --draw DIR ... [--out DIR]

Folders are written by `blockpilot collect`; no model is needed. Collect sizes around the trained one (the default sizes
do), else the window B-2 .. B+2 and the radius are left out and all collected sizes are candidates. Training and test
prompts must differ. Everything that is chosen or fitted uses training traces alone.

    optimal sizes   which size is best for each request, among all and among B-2 .. B+2, and how flat the optimum is
    split           the best size of one part of an answer, judged on the other part: what lasts, and what was luck
    prefill         the published predictor and its ablations
    load            a wide choice under named step costs, against best fixed, oracles and the step pilots

Prints Markdown; `--out` gets `rows.jsonl`, `tables.md`, `taus.json` (every test request at every size), `manifest.json`
and two figures. `--part networks` leaves out
what decides at every step (minutes of Python that need no GPU), `--part walks` does that alone; `--draw` joins the rows
of both and draws again, also where the first machine had no Matplotlib. Intervals are 95 % of a paired bootstrap over
requests, drawn within each task. With `--quick` networks are 16 times narrower and data are cut: a check that
everything runs, no result.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pilot_study.loads import PARTS, LoadStudy, fit_step_pilots
from pilot_study.output import draw_figures, join_rows, write_markdown
from pilot_study.request_sizes import best_fixed, optimal_rows, split_rows
from pilot_study.trace_tables import SizeTable, read_traces
from pilot_study.variants import (
    PrefillInputs,
    Variant,
    judge_choice,
    judge_variant,
    list_variants,
    predict,
    train_variant,
)

from blockpilot import __version__
from blockpilot.core.errors import InputError
from blockpilot.core.files import write_text
from blockpilot.replay.trace_files import TraceSet, require_disjoint
from blockpilot.replay.traces import Trace

ALL_TRACES = 1 << 30
QUICK_TRACES, QUICK_SHRINK, QUICK_STEPS = 48, 16, 40

logger = logging.getLogger("pilot_experiments")


class Study:
    """Traces of both kinds and all that is computed from them once."""

    def __init__(self, train: list[Trace], test: list[Trace], *, device: str, num_steps: int, shrink: int) -> None:
        self.train_traces, self.test_traces = train, test
        self.trained = test[0].setting.trained_block_size
        self.sizes = test[0].setting.sizes
        if self.trained not in self.sizes:
            raise InputError(f"the traces lack the trained block size {self.trained}: collect with --sizes")
        self.train, self.test = (SizeTable.of(traces, (1, *self.sizes)) for traces in (train, test))
        self.train_inputs, self.test_inputs = (PrefillInputs(traces, device) for traces in (train, test))
        has_logits = self.train_inputs.has_logits and self.test_inputs.has_logits
        self.variants = list_variants(
            self.sizes, self.trained, num_steps=num_steps, shrink=shrink, has_logits=has_logits
        )

    def rows(self, manifest: dict[str, Any], part: str) -> Iterator[dict[str, Any]]:
        if part != "walks":
            yield from self.request_rows()
        pilots = []
        if part != "networks" and all(trace.drafts for trace in self.test_traces):
            pilots = fit_step_pilots(self.train_traces, manifest)
        logger.info("under step costs, with %d step pilots", len(pilots))
        study = LoadStudy(
            self.train,
            self.test,
            self.train_inputs,
            self.test_inputs,
            wide=replace(self.variants[0], sizes=self.train.sizes),
            trained=self.trained,
        )
        yield from study.rows(self.test_traces, pilots, part)

    def request_rows(self) -> Iterator[dict[str, Any]]:
        """One size per request, judged by tau."""
        main = self.variants[0]
        for sizes in dict.fromkeys((self.sizes, main.sizes)):
            yield from optimal_rows(self.test, sizes, self.trained)
        fixed = best_fixed(self.train, main.sizes)
        yield from split_rows(self.test, main.sizes, trained=self.trained, fixed=fixed)
        yield from self.baselines(main)
        for variant in self.variants:
            yield from self.judge(variant)

    def baselines(self, main: Variant) -> Iterator[dict[str, Any]]:
        """What a choice is measured against, in the form of the other rows."""
        fixed = best_fixed(self.train, main.sizes)
        ways = {f"fixed {self.trained}": (np.full(len(self.test), self.trained), main.sizes)}
        for name, sizes in {"the candidates": main.sizes, "all sizes": self.sizes}.items():
            if name == "the candidates" or sizes != main.sizes:
                best = np.array(sizes)[self.test.columns(sizes).argmax(axis=1)]
                ways[f"best fixed of {name}"] = (np.full(len(self.test), best_fixed(self.train, sizes)), main.sizes)
                ways[f"oracle over {name}"] = (best, sizes)
        for name, (chosen, sizes) in ways.items():
            part = judge_choice(self.test, chosen, sizes, trained=self.trained, fixed=fixed)
            yield {"experiment": "prefill", "group": "baseline", "name": name, "task": self.test.overall} | part

    def judge(self, variant: Variant) -> Iterator[dict[str, Any]]:
        started = time.perf_counter()
        scores = self.train.columns(variant.sizes)
        network = train_variant(variant, self.train_inputs, scores)
        chosen = np.array(variant.sizes)[predict(network, self.test_inputs).argmax(axis=1)]
        logger.info("%s: %.0f s", variant.name, time.perf_counter() - started)
        yield from judge_variant(variant, chosen, train=self.train, test=self.test, trained=self.trained)


def describe_run(arguments: argparse.Namespace, manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kept = ("target", "drafter", "drafter_sha256", "dtype", "is_estimate", "temperature", "max_new_tokens", "split")
    return {
        "package_version": __version__,
        "torch": torch.__version__,
        "device": arguments.device,
        "num_steps": arguments.steps,
        "is_quick": arguments.quick,
        "part": arguments.part,
        "trained_block_size": manifests[0]["trained_block_size"],
        "traces": [
            {key: manifest.get(key) for key in (*kept, "anchors", "num_traces", "requests_sha256")}
            for manifest in manifests
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", default=[], metavar="DIR")
    parser.add_argument("--test", type=Path, nargs="+", default=[], metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--part", choices=PARTS, default="all", help="of the work (default: all)")
    draw_help = "no work: tables and figures of the rows in these folders (into the first one without --out)"
    parser.add_argument("--draw", type=Path, nargs="+", default=[], metavar="DIR", help=draw_help)
    parser.add_argument("--device", default="cpu", help="where networks are trained (default: cpu)")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="of training (default: 1500)")
    step_help = "training traces that step pilots are fitted to, 0 for no step pilots (default: 128)"
    parser.add_argument("--step-traces", type=int, default=128, metavar="N", help=step_help)
    parser.add_argument("--quick", action="store_true", help="small networks, few traces: does it run?")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not arguments.draw and not (arguments.train and arguments.test):
        parser.error("give --train and --test, or --draw")
    try:
        (draw if arguments.draw else run)(arguments)
    except InputError as error:
        sys.exit(f"pilot_experiments: {error}")


def run(arguments: argparse.Namespace) -> None:
    if arguments.quick:
        arguments.steps = QUICK_STEPS
    manifests = [TraceSet(folder).manifest for folder in (*arguments.train, *arguments.test)]
    num_fitted = 0 if arguments.part == "networks" else arguments.step_traces
    train = read_traces(arguments.train, like=None, num_drafted=num_fitted)
    test = read_traces(arguments.test, like=manifests[0], num_drafted=ALL_TRACES if num_fitted else 0)
    if arguments.quick:
        train, test = (traces[:: max(1, len(traces) // QUICK_TRACES)][:QUICK_TRACES] for traces in (train, test))
    if not train or not test:
        raise InputError("no traces with anything to decode")
    require_disjoint(train, test)
    logger.info("%d training traces, %d test traces", len(train), len(test))
    shrink = QUICK_SHRINK if arguments.quick else 1
    study = Study(train, test, device=arguments.device, num_steps=arguments.steps, shrink=shrink)
    rows = list(study.rows(manifests[0], arguments.part))
    if arguments.out is not None:
        write_text(arguments.out / "taus.json", json.dumps(study.test.describe_taus()) + "\n")
    show(rows, describe_run(arguments, manifests), arguments.out)


def draw(arguments: argparse.Namespace) -> None:
    """What earlier runs computed, together."""
    parts, manifests = [], []
    for folder in arguments.draw:
        if not (folder / "rows.jsonl").is_file() or not (folder / "manifest.json").is_file():
            raise InputError(f"{folder} holds no rows of an earlier run")
        parts.append([json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()])
        manifests.append(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    facts = manifests[0] if len(manifests) == 1 else manifests[0] | {"part": "all", "parts": manifests}
    show(join_rows(parts), facts, arguments.out or arguments.draw[0])


def show(rows: Sequence[Mapping[str, Any]], facts: dict[str, Any], out: Path | None) -> None:
    text = write_markdown(rows, facts["trained_block_size"])
    print(text)
    if out is None:
        return
    write_text(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(out / "tables.md", text + "\n")
    write_text(out / "manifest.json", json.dumps(facts, indent=1) + "\n")
    try:
        draw_figures(rows, out, facts["trained_block_size"])
    except ImportError as error:
        logger.info("no figures (%s): draw them elsewhere with --draw %s", error, out)


if __name__ == "__main__":
    main()
