"""The reliability of a calibration: how often nodes are right, against how often they were said to be."""

import logging
from collections.abc import Mapping
from pathlib import Path

from blockpilot.core.files import atomic_path
from blockpilot.replay.pilot_report import Reliability

NAME = "reliability"
STYLES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)), (0, (3, 1, 1, 1)))

logger = logging.getLogger(__name__)


def draw_reliability(out: Path, reports: Mapping[str, Reliability]) -> list[Path]:
    """Write `reliability.svg` and `.png` into `out`; nothing where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no figure drawn: matplotlib is not installed (pip install 'blockpilot[figures]')")
        return []
    written = []
    with rc_context({"svg.hashsalt": NAME, "font.size": 9}):
        figure = Figure(figsize=(4.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for index, (task, report) in enumerate(reports.items()):
            is_all = task == "all"
            axes.plot(
                report.predicted,
                report.observed,
                color="black" if is_all else f"C{index}",
                linestyle="-" if is_all else STYLES[index % len(STYLES)],
                linewidth=2 if is_all else 1,
                marker="o" if is_all else None,
                markersize=3,
                label=f"{task} (error {report.error:.3f})",
            )
        axes.set(xlabel="predicted probability of a node", ylabel="observed frequency", xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8)
        for kind in ("svg", "png"):
            with atomic_path(out / f"{NAME}.{kind}") as temporary:
                figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            written.append(out / f"{NAME}.{kind}")
    return written
