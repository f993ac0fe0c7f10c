"""The paper's figures 3a to 3c, as this study reads them, one file for each temperature."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blockpilot.core.files import atomic_path
from paper_study.claims import best_sizes, near_shares, swept_sizes
from paper_study.evidence import Evidence, Half
from paper_study.plan import name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REACHES = range(9)


def draw_figures(evidence: Evidence, out: Path) -> list[Path]:
    """Nothing for temperatures whose sweep has not ended."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    paths = []
    for half in evidence.halves:
        if half.sweep is None or not len(half.sweep):
            continue
        with rc_context({"svg.hashsalt": "paper", "font.size": 8}):  # the same rows give the same files
            figure = Figure(figsize=(11, 3.2), layout="constrained")
            first, second, third = figure.subplots(1, 3)
            _draw_curves(first, half)
            _draw_counts(second, half)
            _draw_reach(third, evidence, half)
            paths.append(out / f"figure_3_{name_of(half.temperature)}.svg")
            with atomic_path(paths[-1]) as temporary:
                figure.savefig(temporary, format="svg", metadata={"Date": None})
    return paths


def _draw_curves(axes: "Axes", half: Half) -> None:
    assert half.sweep is not None
    sizes = swept_sizes(half)
    for task, places in half.sweep.by_task():
        tau = half.sweep.rows(places).columns(sizes).mean(axis=0)
        axes.plot(sizes, tau, label=task, color="black" if task == "all" else None, linewidth=2 if task == "all" else 1)
    axes.set(title="3a: mean tau by block size", xlabel="block size")
    axes.legend(fontsize=6)


def _draw_counts(axes: "Axes", half: Half) -> None:
    sizes, counts = np.unique(best_sizes(half), return_counts=True)
    axes.bar(sizes, 100 * counts / counts.sum(), color="grey")
    axes.set(title="3b: best size of each request, %", xlabel="block size")


def _draw_reach(axes: "Axes", evidence: Evidence, half: Half) -> None:
    found = [near_shares(evidence, half, reach) for reach in _REACHES]
    axes.plot(_REACHES, [100 * float(one[1].mean()) for one in found if one], color="black", marker="o")
    axes.set(title=f"3c: best size within k of {evidence.trained}, %", xlabel="k", ylim=(0, 100))
