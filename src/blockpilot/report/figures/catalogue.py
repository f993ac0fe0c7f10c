"""All figures of a report: name, heading, what it shows, and how it is drawn."""

from collections.abc import Callable

from matplotlib.figure import Figure

from blockpilot.report.figures.lengths import draw_acceptance, draw_best_sizes, draw_tau_by_size
from blockpilot.report.figures.speed import draw_speed_by_size, draw_speedups, draw_step_costs, draw_time_split
from blockpilot.report.figures.style import NoFigureError, render
from blockpilot.report.run_data import Run

_Draw = Callable[[Run, Figure], None]
_CATALOGUE: tuple[tuple[str, str, str, _Draw], ...] = (  # name, title, caption, how it is drawn
    (
        "speedups",
        "Speedup over plain decoding",
        "Decode tokens per second over those of plain decoding in the same run. Whiskers: paired bootstrap over "
        "prompts, 95 %. Dashed: plain decoding.",
        draw_speedups,
    ),
    (
        "speed-by-size",
        "Speed by block size",
        "Fixed DFlash chains by block size, and the other methods as lines across, named from the fastest down.",
        draw_speed_by_size,
    ),
    (
        "tau-by-size",
        "Tokens per step by block size",
        "Fixed DFlash chains; mean of the answers' means.",
        draw_tau_by_size,
    ),
    (
        "best-sizes",
        "Which fixed size serves a prompt best",
        "For every prompt the best of the measured sizes, by speed and by tokens per step. Known only in hindsight; "
        "with few tokens per prompt much of the spread is noise.",
        draw_best_sizes,
    ),
    (
        "acceptance",
        "Acceptance by position",
        "Of the steps that drafted as far as a position, the share whose accepted path reached it. Each answer's last "
        "step is left out.",
        draw_acceptance,
    ),
    (
        "time-split",
        "Where a step's time goes",
        "Mean milliseconds of one step. Other: keeping the cache, showing the drafter what was kept, text.",
        draw_time_split,
    ),
    (
        "step-costs",
        "What steps cost on this machine",
        "Measured before decoding, the host's work included. Adaptive methods weigh tokens against these milliseconds.",
        draw_step_costs,
    ),
)


def draw_figures(run: Run, prefix: str) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """The figures that the run has data for; of the others the title, and why they are missing."""
    figures, left_out = [], []
    for kind, title, caption, draw in _CATALOGUE:
        name = f"{prefix}{kind}"
        try:
            svg = render(draw, run, name)
        except NoFigureError as error:
            left_out.append((title, str(error)))
        else:
            figures.append({"name": name, "title": title, "caption": caption, "svg": svg})
    return figures, left_out
