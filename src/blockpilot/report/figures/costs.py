"""The step costs that adaptive methods weighed in a run."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from blockpilot.report.figures.style import WIDTH, line_looks
from blockpilot.report.run_data import Run

KINDS = {"verify": "checking, anchor included", "draft": "drafting, by block size"}


def draw_step_costs(run: Run) -> Figure | str:
    sessions = [session for session in run.manifest.get("sessions", []) if "step_costs" in session]
    if not sessions:
        return "no method of this run weighs step costs"
    costs: Mapping[str, Any] = sessions[-1]["step_costs"]
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), KINDS.items(), strict=True):
        for (batch, context), look in zip(_places(costs[kind]), line_looks(), strict=False):
            points = [p for p in costs[kind] if (p["batch_size"], p["context_length"]) == (batch, context)]
            label = f"{batch} {'request' if batch == 1 else 'requests'}, context {context}"
            points.sort(key=lambda point: point["tokens"])
            axes.plot([p["tokens"] for p in points], [p["ms"] for p in points], label=label, **look)
        sizes = sorted({point["tokens"] for point in costs[kind]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelsize=7)
        axes.set(title=title, xlabel="tokens per request")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("milliseconds")
    figure.axes[1].legend(*figure.axes[0].get_legend_handles_labels(), loc="upper left")  # drafts leave room
    return figure


def _places(points: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted({(point["batch_size"], point["context_length"]) for point in points})
