"""How every figure looks: colours that colour-blind readers tell apart (Okabe and Ito), and line styles, markers and
hatches that survive a grey printer."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from blockpilot.report.run_data import Run

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY, LIGHT = "#8c8c8c", "#d9d9d9"
WIDTH = 8.6  # inches, the width of the page's text
SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "path",
}
FAMILIES = {  # start of a method's name -> colour, hatch
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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, BLACK, SKY, GREY)


@dataclass(frozen=True)
class Drawing:
    svg: str  # an element that stands inside a page


def family(method: str) -> tuple[str, str]:
    """Colour and hatch of a method."""
    return next((look for start, look in FAMILIES.items() if method.startswith(start)), (GREY, ""))


def line_looks() -> Any:
    """Colour, line style and marker for one series after the other, without end."""
    return cycle(
        {"color": colour, "linestyle": line, "marker": marker}
        for colour, line, marker in zip(COLOURS, LINES, MARKERS, strict=True)
    )


def render(draw: Callable[[Run], Figure | str], run: Run, name: str) -> Drawing | str:
    """The figure, or why there is none. The same figure gives the same text."""
    with rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = draw(run)
        return figure if isinstance(figure, str) else Drawing(_to_svg(figure))


def _to_svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"[ \t]*\n[ \t]*", "\n", text).strip()
