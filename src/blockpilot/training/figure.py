"""The curve of a run: loss, held-out tau, and how right the drafter is at each position. Needs matplotlib."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path
from blockpilot.core.reading import convert
from blockpilot.training.checkpoints import LOG, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Evaluation(TypedDict):
    tau_mean: float | None
    tau_loop_free: float | None
    accuracy: list[float]
    recall: list[float]


class _Row(TypedDict):
    step: int
    loss: NotRequired[float]
    evaluation: NotRequired[_Evaluation]


_TAUS = {"tau_mean": "per answer", "tau_loop_free": "loop-free"}

logger = logging.getLogger(__name__)


def draw_curve(out: Path) -> list[Path]:
    """Write `curve.svg` and `curve.png` from the log in `out`."""
    rows = [row for row in read_log(out) if _is_row(row)]
    evaluations = [row for row in rows if row.get("evaluation")]

    def draw(figure: "Figure") -> None:
        loss, tau, position = figure.subplots(1, 3)
        trained = [row for row in rows if "loss" in row]
        marker = "o" if len(trained) < 3 else None
        loss.plot([row["step"] for row in trained], [row["loss"] for row in trained], marker=marker)
        loss.set(title="loss", xlabel="step")
        _draw_tau(tau, evaluations)
        _draw_positions(position, evaluations)

    return write_figure(out, "curve", (10.5, 3.2), draw)


def _is_row(row: dict[str, Any]) -> bool:
    """Whether it can be drawn: others may have written into the log."""
    try:
        convert({name: value for name, value in row.items() if name != "evaluation" or value}, _Row, LOG)
    except InputError as error:
        logger.warning("left out of the curve: %s", error)
        return False
    return True


def write_figure(out: Path, name: str, size: tuple[float, float], draw: "Callable[[Figure], None]") -> list[Path]:
    """Draw a figure and write it as SVG and PNG; nothing where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no %s drawn: matplotlib is not installed (pip install 'blockpilot[figures]')", name)
        return []
    paths = [out / f"{name}.{kind}" for kind in ("svg", "png")]
    # the salt: the same data gives the same file; names are no formulas
    with (
        rc_context({"svg.hashsalt": name, "font.size": 9, "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of letters that the font lacks
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for path in paths:
            is_svg = path.suffix == ".svg"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata={"Date": None} if is_svg else None)
    return paths


def _draw_tau(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    for key, label in _TAUS.items():
        axes.plot([row["step"] for row in rows], [row["evaluation"][key] for row in rows], marker="o", label=label)
    axes.set(title="held-out tau", xlabel="step")
    axes.legend()


def _draw_positions(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    """First choice at every evaluation, the last one dark; and where the right token is among the best 8 at the end."""
    for index, row in enumerate(rows):
        accuracy = row["evaluation"]["accuracy"]
        is_last = index == len(rows) - 1
        depths = range(1, len(accuracy) + 1)
        label = "first choice" if is_last else None
        axes.plot(depths, accuracy, color="C0", alpha=1.0 if is_last else 0.25, label=label)
        if is_last:
            axes.plot(depths, row["evaluation"]["recall"], color="C1", label="among the best 8")
    axes.set(title="held-out accuracy", xlabel="position in the block", ylim=(0, 1))
    if rows:
        axes.legend()
