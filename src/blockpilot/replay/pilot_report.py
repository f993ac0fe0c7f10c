"""What a pilot gains on traces it has not seen: against plain decoding, the best fixed choices and the oracles.

The best fixed chain and tree are chosen on the training traces. Intervals are paired bootstrap over requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.calibration import Calibration, expected_calibration_error
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fitting import mark_hits
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot
from blockpilot.pilots.growth import MAX_WIDTH, GrowthRules, falling_costs, grow_nodes
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.simulate import SimulatedStep, oracle_request, oracle_steps, simulate, total
from blockpilot.replay.traces import Trace
from blockpilot.training.figure import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Walks = list[list[SimulatedStep]]  # the steps of every request
_TREES = (2, 3, 4, 6, 8, 12, 15, 24, 31, 63)
_NUM_NODES = 15  # nodes per anchor whose probabilities are judged
_NUM_BINS = 15
_STYLES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)), (0, (3, 1, 1, 1)))
LOADS = {  # what a draft, a plain step and each drafted token checked cost, in plain steps
    "flat": StepCosts.linear(0.15, 1.0, 0.0),
    "mild": StepCosts.linear(0.15, 1.0, 0.02),
    "cpu-like": StepCosts.linear(0.25, 1.0, 0.05),
    "loaded": StepCosts.linear(0.25, 1.0, 0.1),
    "saturated": StepCosts.linear(0.2, 1.0, 0.5),
}


@dataclass(frozen=True)
class Row:
    """One method under one load, all requests together."""

    load: str
    method: str
    tau: float
    over_plain: float
    over_best_fixed: float
    interval: tuple[float, float]  # 95 %, of over_best_fixed
    draft_share: float  # of steps that drafted
    verify_size: float  # mean


def compare(
    train: Sequence[Trace], test: Sequence[Trace], pilots: Sequence[Pilot], costs: StepCosts, *, load: str
) -> list[Row]:
    """Rows of plain decoding, best fixed chain and tree, the given pilots and the oracles on the test traces."""
    sizes = sorted(set.intersection(*(set(trace.setting.sizes) for trace in test)))
    if not sizes or not any(trace.num_anchors for trace in test):
        raise InputError("the held-out traces share no block size, or their answers have one token: collect others")
    train = _alike(train, test, sizes)
    chain = _best([FixedPilot(size) for size in sizes], train, costs)
    trees = [TreePilot(count, size) for size in sorted(test[0].drafts) for count in _TREES if count >= size // 4]
    walks: dict[str, Walks] = {
        "ar": [simulate(trace, PlainPilot(), costs) for trace in test],
        f"best fixed ({chain.name})": [simulate(trace, chain, costs) for trace in test],
    }
    if trees:
        tree = _best(trees, train, costs)
        walks[f"best tree ({tree.name})"] = [simulate(trace, tree, costs) for trace in test]
    is_pipelined = bool(costs.padding)  # measured on a device, where choices come one step late
    for pilot in pilots:
        priced = replace(pilot, costs=costs) if isinstance(pilot, StepPilot) else pilot
        walks[pilot.name] = [simulate(trace, priced, costs, is_pipelined=is_pipelined) for trace in test]
    walks["oracle per request"] = [oracle_request(trace, (1, *sizes), costs)[1] for trace in test]
    if all(trace.setting.is_every_anchor for trace in test):
        walks["oracle per step"] = [oracle_steps(trace, costs, sizes=sizes) for trace in test]
    plain, fixed = list(walks.values())[:2]
    return [_row(load, name, found, plain=plain, fixed=fixed) for name, found in walks.items()]


def _alike(train: Sequence[Trace], test: Sequence[Trace], sizes: Sequence[int]) -> list[Trace]:
    """The traces to choose fixed sizes on: of the temperatures that are judged, and with all sizes."""
    temperatures = {trace.temperature for trace in test}
    found = [trace for trace in train if trace.temperature in temperatures and set(sizes) <= set(trace.setting.sizes)]
    if not found:
        raise InputError(
            f"no training trace has the temperatures {sorted(temperatures)} and block sizes {list(sizes)} of the "
            "held-out ones, so no fixed size can be chosen on them: collect both alike"
        )
    return found


@dataclass(frozen=True)
class Reliability:
    """Predicted and observed frequencies of nodes, in equally full bins."""

    error: float
    predicted: list[float]
    observed: list[float]
    num_nodes: int


def judge_calibration(pilot: StepPilot, traces: Sequence[Trace]) -> dict[str, Reliability]:
    """Per task, and pooled under the name `all`: the likeliest nodes of every second anchor, at every draft size."""
    found: dict[str, list[tuple[NDArray[np.float32], NDArray[np.bool_]]]] = {}
    for trace in traces:
        calibration = pilot.sampled if pilot.sampled is not None and trace.temperature > 0 else pilot.calibration
        for size in trace.drafts:
            found.setdefault(trace.task, []).append(_node_outcomes(calibration, trace, size))
    reports = {task: _reliability(parts) for task, parts in sorted(found.items())}
    return reports | {"all": _reliability([part for parts in found.values() for part in parts])}


def _node_outcomes(calibration: Calibration, trace: Trace, size: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    probabilities, outcomes = [], []
    true_ranks = trace.draft(size).true_ranks
    for anchor in range(0, trace.num_anchors, 2):
        draft = trace.candidates(size, anchor, MAX_WIDTH)
        nodes = grow_nodes(draft, GrowthRules(falling_costs(_NUM_NODES), draft.num_positions, calibration))
        probabilities += nodes.paths
        outcomes += mark_hits(nodes, true_ranks[anchor], len(nodes.paths)).tolist()
    return np.array(probabilities, np.float32), np.array(outcomes, np.bool_)


def _reliability(parts: Sequence[tuple[NDArray[np.float32], NDArray[np.bool_]]]) -> Reliability:
    probabilities, hits = (np.concatenate([part[index] for part in parts]) for index in range(2))
    bins = np.array_split(np.argsort(probabilities, kind="stable"), _NUM_BINS)
    return Reliability(
        expected_calibration_error(probabilities, hits, _NUM_BINS),
        [float(probabilities[part].mean()) for part in bins if len(part)],
        [float(hits[part].mean()) for part in bins if len(part)],
        len(hits),
    )


def draw_reliability(out: Path, reports: Mapping[str, Reliability]) -> list[Path]:
    """Write `reliability.svg` and `.png`: how often nodes are right, against how often they were said to be."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for index, (task, report) in enumerate(reports.items()):
            is_all = task == "all"
            axes.plot(
                report.predicted,
                report.observed,
                color="black" if is_all else f"C{index}",
                linestyle="-" if is_all else _STYLES[index % len(_STYLES)],
                linewidth=2 if is_all else 1,
                marker="o" if is_all else None,
                markersize=3,
                label=f"{task:.40} (error {report.error:.3f})",
            )
        axes.set(xlabel="predicted probability of a node", ylabel="observed frequency", xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8)

    return write_figure(out, "reliability", (4.4, 4.2), draw)


def _best(pilots: Sequence[FixedPilot] | Sequence[TreePilot], traces: Sequence[Trace], costs: StepCosts) -> Pilot:
    return max(pilots, key=lambda pilot: total([simulate(trace, pilot, costs) for trace in traces]).tokens_per_second)


def _row(load: str, method: str, walks: Walks, *, plain: Walks, fixed: Walks) -> Row:
    everything = total(walks)
    steps = [step for walk in walks for step in walk]
    speed = everything.tokens_per_second
    return Row(
        load=load,
        method=method,
        tau=everything.tau,
        over_plain=speed / total(plain).tokens_per_second,
        over_best_fixed=speed / total(fixed).tokens_per_second,
        interval=_interval(walks, fixed),
        draft_share=sum(step.block_size > 1 for step in steps) / len(steps),
        verify_size=sum(step.verify_size for step in steps) / len(steps),
    )


def _interval(walks: Walks, others: Walks, *, num_samples: int = 2000) -> tuple[float, float]:
    """Of the ratio of speeds: requests are drawn again with replacement, the same for both."""
    ms = np.array([[sum(step.milliseconds for step in walk) for walk in found] for found in (walks, others)])
    drawn = np.random.default_rng(0).integers(0, ms.shape[1], (num_samples, ms.shape[1]))
    sums = ms[:, drawn].sum(axis=-1)  # both finish the same answers
    low, high = np.quantile(sums[1] / sums[0], (0.025, 0.975)).tolist()
    return low, high
