"""How every figure looks: colours that colour-blind readers tell apart (Okabe and Ito), and line styles, markers and
hatches that survive a grey printer."""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockpilot.report.run_data import Run

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT = "#8c8c8c", "#d9d9d9"
WIDTH = 8.6  # inches, the width of the page's text
SHEET = Path(__file__).with_name("page.mplstyle")
_FAMILIES = {  # start of a method's name -> colour, hatch
    "ar": (LIGHT, ""),
    "ngram": (YELLOW, "\\\\"),
    "eagle3": (PINK, "////"),
    "dflash": (SKY, ""),
    "best-fixed": (BLUE, ""),
    "tree": (GREEN, "xxxx"),
    "blockpilot": (ORANGE, "++++"),
    "chain-step": (RED, "----"),
    "step": (RED, "||||"),
    "auto": (RED, ""),
}
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)), (0, (3, 3)))
_MAX_LABEL = 40  # characters
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, BLACK, SKY, GREY)


class NoFigureError(Exception):
    """A run lacks what a figure needs; the message says what."""


def family(method: str) -> tuple[str, str]:
    """Colour and hatch of a method."""
    return next((look for start, look in _FAMILIES.items() if method.startswith(start)), (GREY, ""))


def label(name: str) -> str:
    """A name as matplotlib draws it: short, on one line, and not hidden because it begins with an underscore."""
    line = " ".join(name.split())
    shown = line if len(line) <= _MAX_LABEL else line[:_MAX_LABEL] + "..."
    return f" {shown}" if shown.startswith("_") else shown


def line_looks() -> Any:
    """Colour, line style and marker for one series after the other, without end."""
    return cycle(
        {"color": colour, "linestyle": line, "marker": marker}
        for colour, line, marker in zip(_COLOURS, LINES, _MARKERS, strict=True)
    )


def make_axes(figure: Figure, height: float) -> Axes:
    """One plot as wide as the page's text."""
    figure.set_size_inches(WIDTH, height)
    return figure.subplots()


def finish_lines(axes: Axes, ticks: Iterable[int]) -> None:
    """The lines' names stand to the right of the plot."""
    axes.set_xticks(list(ticks))
    axes.grid(axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def finish_bars(axes: Axes, methods: Sequence[str]) -> None:
    """Horizontal bars, one below the other."""
    axes.set_yticks(range(len(methods)), [label(method) for method in methods])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(methods) - 0.4, -0.6)


def render(draw: Callable[[Run, Figure], None], run: Run, name: str) -> str:
    """The figure as an <svg> element that stands inside a page. The same figure gives the same text."""
    with rc_context({"svg.hashsalt": name}, fname=SHEET), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: they are drawn as boxes
        figure = Figure(layout="constrained")
        draw(run, figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)  # comments repeat the labels
    for name in ("width", "height"):  # the page decides
        text = re.sub(rf'(<svg[^>]*?) {name}="[^"]*"', r"\1", text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text).strip()
