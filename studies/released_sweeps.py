"""What the BlockPilot paper's released tables say about choosing a block size per request.

    python studies/released_sweeps.py --data DIR [--out DIR]

DIR holds `gsm8k.json` and `math500.json`: tau of Qwen3-4B with its DFlash drafter at block sizes 4 to 32, 32 samples
each, one greedy generation per sample and size, and the size that the released predictor chose. Prints tables; `--out`
also gets `released_sweeps.json` and `.svg`. Intervals are 95 % of a paired bootstrap over samples; gains are of mean
tau.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pilot_study.intervals import Bootstrap, show
from pilot_study.sweep_noise import fit_noise, oracle_gains, simulate_gains
from pilot_study.sweep_predictors import (
    Choice,
    Predictor,
    best_fixed,
    leave_one_out,
    nearest_neighbours,
    ridge,
)
from pilot_study.sweeps import (
    TASKS,
    WINDOW,
    Sweep,
    best_sizes,
    count_ties,
    flat_shares,
    join,
    likeliest_lengths,
    read_sweep,
)

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = 16
OUTER = (4, 8, 13, 19, 32)  # what a predictor may know of a sample when it chooses among WINDOW
ODD, EVEN = (13, 15, 17, 19), (14, 16, 18)
SMOOTH_SIZES = np.arange(13, 20)  # consecutive sizes of the noise model
DEGREES = (1, 2, 3)
OVERSHOOT = max(WINDOW)  # a last block may run past the end of an answer


@dataclass(frozen=True)
class Way:
    """One way to choose a size per sample."""

    name: str
    knows: str  # what it uses of the sample itself
    chosen: Choice
    candidates: tuple[int, ...] = WINDOW


def list_ways(sweep: Sweep, other: Sweep) -> list[Way]:
    """For one task; `other` is the other one's table."""
    everything, nothing = "tau at every candidate", "nothing"
    ways = [
        Way("oracle 14..18", everything, best_sizes(sweep, WINDOW)),
        Way("oracle, all sizes", everything, best_sizes(sweep, sweep.sizes), sweep.sizes),
        Way("released predictor", "said to be the prompt alone", sweep.released),
        Way("fixed 16", nothing, np.full(len(sweep), TRAINED)),
    ]
    outer = f"tau at {', '.join(map(str, OUTER))}"
    fitted: list[tuple[str, str, Predictor]] = [
        ("best fixed", nothing, best_fixed(WINDOW)),
        *((f"{count} neighbours", outer, nearest_neighbours(OUTER, WINDOW, count)) for count in (3, 8)),
        *((f"ridge {strength}", outer, ridge(OUTER, WINDOW, strength)) for strength in (1, 10)),
    ]
    for name, knows, predictor in fitted:
        ways.append(Way(f"{name}, leave one out", knows, leave_one_out(predictor, sweep)))
        ways.append(Way(f"{name}, from the other task", knows, predictor(other, sweep)))
    for known, candidates in ((ODD, EVEN), (EVEN, (15, 17))):
        knows, among = f"tau at {', '.join(map(str, known))}", "/".join(map(str, candidates))
        predictor = ridge(known, candidates, 1)
        ways.append(Way(f"ridge 1 among {among}, leave one out", knows, leave_one_out(predictor, sweep), candidates))
        ways.append(Way(f"ridge 1 among {among}, from the other task", knows, predictor(other, sweep), candidates))
    return ways


def judge(sweep: Sweep, way: Way, bootstrap: Bootstrap) -> dict[str, Any]:
    """By tau at what was chosen, against 16 and against the best fixed candidate in hindsight."""
    among = sweep.columns(way.candidates)
    ours, oracle, fixed = sweep.at(way.chosen), among.max(axis=1), among[:, among.mean(axis=0).argmax()]
    return {
        "name": way.name,
        "knows": way.knows,
        "candidates": list(way.candidates),
        "tau": bootstrap.mean(ours).to_dict(),
        "gain_over_16": bootstrap.gain(ours, sweep.columns((TRAINED,))[:, 0]).to_dict(),
        "gain_over_best_fixed": bootstrap.gain(ours, fixed).to_dict(),
        "captured": bootstrap.captured(ours, fixed, oracle).to_dict(),
        "num_best": int((ours == oracle).sum()),
    }


def study(sweep: Sweep, ways: list[Way]) -> dict[str, Any]:
    """All about one table."""
    bootstrap = Bootstrap(sweep.tasks)
    tau = {size: sweep.columns((size,))[:, 0] for size in sweep.sizes}
    means = {size: float(values.mean()) for size, values in tau.items()}
    return {
        "num_samples": len(sweep),
        "fixed": {
            size: {
                "tau": bootstrap.mean(tau[size]).to_dict(),
                "gain_over_16": bootstrap.gain(tau[size], tau[TRAINED]).to_dict(),
            }
            for size in sweep.sizes
        },
        "best_fixed": max(means, key=means.__getitem__),
        "ways": [judge(sweep, way, bootstrap) for way in ways],
        "best_sizes": {size: int((best_sizes(sweep, WINDOW) == size).sum()) for size in WINDOW},
        "num_ties": count_ties(sweep, WINDOW),
        "best_beats_16": flat_shares(sweep.columns(WINDOW), tau[TRAINED]),
        "released_equals_oracle": int((sweep.released == best_sizes(sweep, WINDOW)).sum()),
        "answers": compare_answers(sweep),
        "noise": noise_rows(sweep),
    }


def compare_answers(sweep: Sweep) -> dict[str, Any]:
    """Whether the candidates of a sample were measured on the same answer, as far as lengths tell."""
    lengths = [likeliest_lengths(row) for row in sweep.columns(WINDOW)]
    differs = np.array([one.spread > OVERSHOOT for one in lengths])
    steps = np.array([one.steps for one in lengths])  # [N, candidates]
    found: dict[str, Any] = {
        "num_different": int(differs.sum()),
        "median_steps_at_16": float(np.median(steps[:, WINDOW.index(TRAINED)])),
    }
    for name, rows in (("different", differs), ("alike", ~differs)):
        if rows.any():
            part = Bootstrap([task for task, is_in in zip(sweep.tasks, rows, strict=True) if is_in])
            tau = sweep.columns(WINDOW)[rows]
            found[f"oracle_gain_{name}"] = part.gain(tau.max(axis=1), tau[:, WINDOW.index(TRAINED)]).to_dict()
    return found


def noise_rows(sweep: Sweep) -> list[dict[str, Any]]:
    tau = sweep.columns(tuple(SMOOTH_SIZES.tolist()))
    candidates, reference = np.isin(SMOOTH_SIZES, WINDOW), int(np.flatnonzero(SMOOTH_SIZES == TRAINED)[0])
    observed = oracle_gains(tau, candidates, reference)
    rows = []
    for degree in DEGREES:
        report = simulate_gains(fit_noise(tau, SMOOTH_SIZES, degree), candidates, reference)
        share = report.noise_only[1] / observed[1]
        rows.append({"degree": degree, "observed": observed, **asdict(report), "noise_share": share})
    return rows


def describe(name: str, found: dict[str, Any]) -> str:
    total = found["num_samples"]
    lines = [f"## {name}: {total} samples", "", "| size | tau | against 16 |", "|---|---|---|"]
    lines += [
        f"| {size} | {show(row['tau'], '.3f')} | {show(row['gain_over_16'])} |" for size, row in found["fixed"].items()
    ]
    lines += [
        "",
        "| way to choose | knows of the sample | tau | against 16 | against best fixed | of the oracle's gain | best |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in found["ways"]:
        numbers = [show(row["tau"], ".3f"), show(row["gain_over_16"]), show(row["gain_over_best_fixed"])]
        cells = [
            row["name"],
            row["knows"],
            *numbers,
            show(row["captured"], ".0%"),
            f"{row['num_best']}/{total}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    answers = found["answers"]
    lines += [
        "",
        f"Released choice equals the oracle in {found['released_equals_oracle']} of {total}; best sizes "
        f"{found['best_sizes']}, ties in {found['num_ties']}. Best of five beats 16: {found['best_beats_16']}.",
        f"Answers of certainly different length among the five: {answers['num_different']}; median steps at 16: "
        f"{answers['median_steps_at_16']:.0f}; oracle's gain where they differ "
        f"{show(answers.get('oracle_gain_different'))}, where they may be alike "
        f"{show(answers.get('oracle_gain_alike'))}.",
        "",
        "| own curves | noise of tau | oracle observed | noise alone | its share | knowable | model's oracle |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["noise"]:
        parts = [f"{row[key][1]:+.1%}" for key in ("observed", "noise_only", "knowable", "both")]
        parts.insert(2, f"{row['noise_share']:.0%}")
        lines.append(f"| degree {row['degree']} | {row['noise']:.1%} | {' | '.join(parts)} |")
    return "\n".join([*lines, ""])


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": path.stem, "font.size": 9}):  # the same numbers give the same file
        figure = Figure(figsize=(10.5, 3.6), layout="constrained")
        curves, gains = figure.subplots(1, 2, width_ratios=(1, 1.5))
        for task in TASKS:
            rows = {int(size): row["tau"] for size, row in found[task]["fixed"].items()}
            low, high = ([abs(r[edge] - r["value"]) for r in rows.values()] for edge in ("low", "high"))
            means = [r["value"] for r in rows.values()]
            curves.errorbar(list(rows), means, yerr=(low, high), marker="o", capsize=2, label=task)
        curves.set(title="mean tau of a fixed block size", xlabel="block size", ylabel="tau")
        curves.legend()
        _draw_gains(gains, found)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def _draw_gains(axes: "Axes", found: dict[str, Any]) -> None:
    fitted = ("3 neighbours", "8 neighbours", "ridge 1", "ridge 10")
    names = ["oracle 14..18", "released predictor", *(f"{name}, from the other task" for name in fitted)]
    labels = [*names, "simulated: noise alone", "simulated: knowable"]
    for shift, task in ((-0.15, TASKS[0]), (0.15, TASKS[1])):
        rows = {row["name"]: row["gain_over_best_fixed"] for row in found[task]["ways"]}
        places = np.arange(len(names)) + shift
        values = np.array([[rows[name][key] for key in ("value", "low", "high")] for name in names]) * 100
        errors = np.abs(values[:, 1:] - values[:, :1]).T
        axes.errorbar(values[:, 0], places, xerr=errors, fmt="o", capsize=2, label=task)
        color = axes.lines[-1].get_color()
        for place, key in enumerate(("noise_only", "knowable"), start=len(names)):
            ends = sorted(100 * row[key][1] for row in found[task]["noise"])
            axes.plot((ends[0], ends[-1]), (place + shift,) * 2, color=color, linewidth=4, solid_capstyle="butt")
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title="gain of mean tau over the best fixed size", xlabel="%")
    axes.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k.json and math500.json")
    parser.add_argument("--out", type=Path, help="folder for released_sweeps.json and released_sweeps.svg")
    arguments = parser.parse_args()
    try:
        sweeps = {task: read_sweep(arguments.data / f"{task}.json") for task in TASKS}
        first, second = (sweeps[task] for task in TASKS)
        ways = list_ways(first, second), list_ways(second, first)
        found = {task: study(sweeps[task], part) for task, part in zip(TASKS, ways, strict=True)}
        pairs = zip(*ways, strict=True)
        joined = [replace(one, chosen=np.concatenate((one.chosen, another.chosen))) for one, another in pairs]
        found["both"] = study(join([first, second]), joined)
    except InputError as error:
        sys.exit(f"released_sweeps: {error}")
    for name, part in found.items():
        print(describe(name, part))
    if arguments.out:
        write_text(arguments.out / "released_sweeps.json", json.dumps(found, indent=1) + "\n")
        draw(found, arguments.out / "released_sweeps.svg")


if __name__ == "__main__":
    main()
