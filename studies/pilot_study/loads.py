"""Choosing under step costs: one size per request from a wide set, against pilots that choose at every step.

Costs are in plain steps. All methods finish the same answers, so speed is the milliseconds of one over another's, all
requests together. The time that a pilot itself takes is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.pilot_report import LOADS
from blockpilot.replay.pilot_training import TraceGroup, train_step
from blockpilot.replay.simulate import SimulatedStep, oracle_steps, simulate, total
from blockpilot.replay.traces import Trace
from pilot_study.intervals import Bootstrap, Values
from pilot_study.trace_tables import SizeTable
from pilot_study.variants import PrefillInputs, Variant, predict, train_variant

PARTS = ("all", "networks", "walks")  # networks: what trains; walks: what decides at every step, on the host alone
MIN_FITTED = 8  # traces with candidates that step pilots are fitted to


@dataclass(frozen=True)
class LoadStudy:
    """Tables hold the sizes that may be chosen, 1 (plain decoding) among them."""

    train: SizeTable
    test: SizeTable
    train_inputs: PrefillInputs
    test_inputs: PrefillInputs
    wide: Variant  # the network's shape
    trained: int

    def rows(self, traces: Sequence[Trace], pilots: Sequence[StepPilot], part: str) -> Iterator[dict[str, Any]]:
        """`traces` are those of the test table; `pilots` are fitted to others. `part` as in `PARTS`."""
        predicted = self._predicted_tau() if part != "walks" else None
        for load, costs in LOADS.items():
            columns = self._fixed(costs)
            if predicted is not None:
                step_ms = np.array([costs.step_ms(size, size) for size in self.wide.sizes])
                columns["prefill: tau over cost"] = self._chosen(costs, predicted / step_ms)
                columns["prefill: class"] = self._chosen(costs, self._class_scores(costs))
            if part != "networks":
                columns |= self._walked(costs, traces, pilots)
            yield from _describe(load, columns, self.test.tasks)

    def _walked(self, costs: StepCosts, traces: Sequence[Trace], pilots: Sequence[StepPilot]) -> dict[str, Values]:
        """Milliseconds [N] of what decides at every step."""
        columns = {}
        for pilot in pilots:
            priced = replace(pilot, costs=costs)
            columns[pilot.name] = _walk_ms([simulate(trace, priced, costs) for trace in traces])
        if traces[0].setting.is_every_anchor:
            sizes = [size for size in self.test.sizes if size > 1]
            columns["oracle per step (chains)"] = _walk_ms(
                [oracle_steps(trace, costs, sizes=sizes) for trace in traces]
            )
        return columns

    def _predicted_tau(self) -> Values:
        """[N, sizes], of a network that learned tau."""
        by_tau = replace(self.wide, objective="tau")
        network = train_variant(by_tau, self.train_inputs, self.train.columns(by_tau.sizes))
        return predict(network, self.test_inputs)

    def _fixed(self, costs: StepCosts) -> dict[str, Values]:
        """Milliseconds [N] of what needs no fit; best fixed is chosen on the training traces."""
        ms = self.test.milliseconds(costs)
        sizes = self.test.sizes
        fixed = int(self.train.milliseconds(costs).sum(axis=0).argmin())
        return {
            "plain": ms[:, sizes.index(1)],
            f"fixed {self.trained}": ms[:, sizes.index(self.trained)],
            f"best fixed ({sizes[fixed]})": ms[:, fixed],
            "oracle per request": ms.min(axis=1),
        }

    def _class_scores(self, costs: StepCosts) -> Values:
        """Of a network trained to name the size that is fastest under these very costs."""
        speed = 1 / self.train.milliseconds(costs)[:, [self.train.sizes.index(size) for size in self.wide.sizes]]
        network = train_variant(self.wide, self.train_inputs, speed)
        return predict(network, self.test_inputs)

    def _chosen(self, costs: StepCosts, scores: Values) -> Values:
        """Milliseconds [N] at the sizes with the largest scores."""
        places = np.array([self.test.sizes.index(size) for size in self.wide.sizes])[scores.argmax(axis=1)]
        return _pick(self.test.milliseconds(costs), places)


def fit_step_pilots(traces: Sequence[Trace], manifest: Mapping[str, Any]) -> list[StepPilot]:
    """Adaptive tree and chain, from the traces that hold candidates; none where too few do."""
    kept = [trace for trace in traces if trace.drafts]
    if len(kept) < MIN_FITTED:
        return []
    group = TraceGroup(kept, {**manifest, "draft_sizes": sorted(kept[0].drafts)})  # other folders may hold none
    return list(train_step(group))


def _describe(load: str, columns: Mapping[str, Values], tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    bootstrap = Bootstrap(tasks)
    plain, trained, fixed, oracle = list(columns.values())[:4]
    best_name = list(columns)[2]
    for name, ms in columns.items():
        row = {
            "experiment": "load",
            "load": load,
            "name": name,
            "best_fixed": best_name,
            "num_requests": len(ms),
            "speedup": bootstrap.estimate(lambda a, b: a / b, plain, ms).to_dict(),
            "gain_over_trained": bootstrap.gain(trained, ms).to_dict(),
            "gain_over_best_fixed": bootstrap.gain(fixed, ms).to_dict(),
        }
        if name.startswith("prefill"):
            captured = bootstrap.estimate(lambda a, b, c: (b / a - 1) / (b / c - 1), ms, fixed, oracle)
            row["captured"] = captured.to_dict()
        yield row


def _walk_ms(walks: Sequence[Sequence[SimulatedStep]]) -> Values:
    return np.array([total([walk]).milliseconds for walk in walks], dtype=np.float64)


def _pick(values: Values, places: NDArray[np.int64]) -> Values:
    """`values` [N, S] at one column per row."""
    return values[np.arange(len(values)), places]
