"""Is the adaptive pilot as good as the best constant choice on kinds of text that it was not fitted to?

    blockpilot collect --prompts KIND1.jsonl KIND2.jsonl ... --temperature 0 --out traces/t0     (and 0.7, 1)
    python benchmarks/unseen_kinds.py --traces traces/t0 traces/t0.7 traces/t1 [--profile FILE]

One kind (a prompt file) after the other is left out: the pilot is fitted to the others, at all temperatures, and walks
through the answers of that kind (`replay/simulate.py`), on several machines: this one's measured costs (`--profile`,
written by `blockpilot profile --json`), and imagined ones. Constant choices walk through the same answers. For each
kind the best of them is chosen on one half of its answers and compared on the other, and the other way round; `ratio`
is the pilot's tokens per second over it, `over plain` over plain decoding. Intervals of 95 % resample answers.

    flat      any check costs what one token costs
    steep     every checked token costs a tenth of a plain step more
    stepped   checks are padded to 1, 4, 16 and 64 tokens, each a quarter dearer than the one before
    small     two slow cores: a check of 7 tokens costs 1.55 plain steps, one of 64 costs 10
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.bench.statistics import divide
from blockpilot.cli.console import print_columns, print_json, show_counted
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.progress import Progress
from blockpilot.core.reading import read_json
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.cost_model import CostPoint, StepCosts
from blockpilot.pilots.fitting import fit_calibration, fit_forecast
from blockpilot.pilots.registry import load_pilot
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.pilot_training import TraceGroup, drafts_of, read_group
from blockpilot.replay.simulate import SimulatedStep, simulate
from blockpilot.replay.traces import Trace

CONSTANTS = (
    "ar",
    "fixed:4",
    "fixed:8",
    "fixed:16",
    "tree:3@4",
    "tree:6@8",
    "tree:15@8",
    "tree:15",
    "tree:31",
    "tree:63",
)
MIN_ANSWERS = 4  # of a kind at a temperature
_SEED, _NUM_RESAMPLES = 20261119, 1000
_CHECKS = {1: 1.0, 2: 1.08, 4: 1.23, 7: 1.55, 8: 1.68, 16: 2.84, 32: 5.0, 64: 10.0}  # of two cores, in plain steps
_DRAFTS = {4: 0.29, 8: 0.38, 16: 0.63}
Walk = tuple[float, float]  # tokens, milliseconds
Row = dict[str, Any]


def machines() -> dict[str, StepCosts]:
    drafts = tuple(CostPoint(size, 0.2) for size in (4, 8, 16))
    stepped = tuple(CostPoint(tokens, 1.25**step) for step, tokens in enumerate((1, 4, 16, 64)))
    return {
        "flat": StepCosts(drafts, (CostPoint(1, 1.0), CostPoint(64, 1.0))),
        "steep": StepCosts(drafts, (CostPoint(1, 1.0), CostPoint(64, 7.3))),
        "stepped": StepCosts(drafts, stepped, padding=(1, 4, 16, 64)),
        "small": StepCosts(
            tuple(CostPoint(size, ms) for size, ms in _DRAFTS.items()),
            tuple(CostPoint(tokens, ms) for tokens, ms in _CHECKS.items()),
            0.05,
        ),
    }


def fit(groups: Sequence[TraceGroup], kind: str) -> StepPilot:
    """To everything but one kind."""
    traces = [trace for group in groups for trace in group.traces if trace.task != kind]
    sizes = tuple(groups[0].manifest["draft_sizes"])
    found: dict[bool, Any] = {}
    for is_sampled in (False, True):
        drafts = {
            size: drafts_of([one for one in traces if (one.temperature > 0) is is_sampled], size) for size in sizes
        }
        calibration = fit_calibration(list(drafts.values()))
        found[is_sampled] = calibration, fit_forecast(drafts, calibration)
    (calibration, forecast), (sampled, sampled_forecast) = found[False], found[True]
    return StepPilot(
        calibration,
        StepCosts.linear(),
        draft_sizes=sizes,
        forecast=forecast,
        sampled=sampled,
        sampled_forecast=sampled_forecast,
    )


def walk(traces: Sequence[Trace], pilot: Pilot, costs: StepCosts) -> list[Walk]:
    return [_add_up(simulate(trace, pilot, costs)) for trace in traces]


def _add_up(steps: Sequence[SimulatedStep]) -> Walk:
    return float(sum(step.emitted for step in steps)), sum(step.milliseconds for step in steps)


def compare(pilot: Sequence[Walk], constants: Mapping[str, Sequence[Walk]]) -> Row:
    """Of one kind on one machine."""
    plain, best = np.array(constants["ar"]), np.empty((len(pilot), 2))
    chosen = []
    for half in (0, 1):
        rates = {name: _rate(np.array(walks)[1 - half :: 2]) for name, walks in constants.items()}
        chosen.append(max(rates, key=rates.__getitem__))
        best[half::2] = np.array(constants[chosen[-1]])[half::2]
    ours = np.array(pilot)
    over_best, over_plain = _ratio(ours, best), _ratio(ours, plain)
    return {"best": chosen, "ratio": over_best[0], "ci": over_best[1], "over_plain": over_plain[0]} | {
        "over_plain_ci": over_plain[1],
        "num_answers": len(pilot),
    }


def _rate(walks: np.ndarray) -> float:
    return float(walks[:, 0].sum() / walks[:, 1].sum())


def _ratio(ours: np.ndarray, others: np.ndarray) -> tuple[float, list[float]]:
    random = np.random.default_rng(_SEED)
    places = random.integers(0, len(ours), (_NUM_RESAMPLES, len(ours)))
    drawn = [_rate(ours[one]) / _rate(others[one]) for one in places]
    return _rate(ours) / _rate(others), [float(value) for value in np.quantile(drawn, (0.025, 0.975))]


def measure(groups: Sequence[TraceGroup], costs: Mapping[str, StepCosts]) -> list[Row]:
    kinds = sorted({trace.task for group in groups for trace in group.traces})
    if len(kinds) < 2:
        raise InputError("these traces are of one kind; collect prompts of several files")
    rows = []
    with show_counted("kinds left out") as report:
        progress = Progress(report, len(kinds))
        progress.prepare("fitting")
        for kind in kinds:
            fitted = fit(groups, kind)
            for group in groups:
                traces = [trace for trace in group.traces if trace.task == kind]
                if len(traces) < MIN_ANSWERS:
                    continue
                for machine, cost in costs.items():
                    walks = {name: walk(traces, load_pilot(name), cost) for name in CONSTANTS}
                    found = compare(walk(traces, replace(fitted, costs=cost), cost), walks)
                    where = {"kind": kind, "temperature": group.manifest["temperature"], "machine": machine}
                    rows.append(where | found)
            progress.advance(kind)
    return rows


def add_means(rows: Sequence[Row]) -> list[Row]:
    """Per temperature and machine; kinds weigh the same."""
    found = []
    for place in sorted({(row["temperature"], row["machine"]) for row in rows}):
        own = [row for row in rows if (row["temperature"], row["machine"]) == place]
        means = {name: divide(sum(row[name] for row in own), len(own)) for name in ("ratio", "over_plain")}
        worst = {f"worst_{name}": min(row[name] for row in own) for name in ("ratio", "over_plain")}
        found.append({"kind": "mean", "temperature": place[0], "machine": place[1], **means, **worst})
    return found


def show(rows: Sequence[Row]) -> None:
    columns: dict[str, list[str]] = {}
    for row in rows:
        for name, text in {
            "kind": row["kind"],
            "T": f"{row['temperature']:g}",
            "machine": row["machine"],
            "ratio": f"{row['ratio']:.3f}",
            "over plain": f"{row['over_plain']:.3f}",
            "worst of kinds": f"{row['worst_ratio']:.3f}, {row['worst_over_plain']:.3f}",
        }.items():
            columns.setdefault(name, []).append(text)
    print_columns(columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="judged with these costs, too: `this machine`")
    parser.add_argument("--json", action="store_true", help="all rows, one JSON object a line")
    arguments = parser.parse_args()
    try:
        costs = machines()
        if arguments.profile is not None:
            values = read_json(arguments.profile)
            if values is None:
                raise InputError(f"{arguments.profile} does not exist: write it with `blockpilot profile`")
            costs["this machine"] = StepCosts.from_dict(values.get("costs", values))
        groups = [read_group([folder]) for folder in arguments.traces]
        rows = measure(groups, costs)
    except BlockPilotError as error:
        print(f"unseen_kinds.py: error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        for row in [*rows, *add_means(rows)]:
            print_json(row)
    else:
        show(add_means(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
