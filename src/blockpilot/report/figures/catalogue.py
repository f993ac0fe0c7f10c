"""All figures of a report: `captions.toml` says what each shows, the table here how it is drawn."""

import tomllib
from pathlib import Path

from blockpilot.report.figures.lengths import draw_acceptance, draw_best_sizes, draw_tau_by_size
from blockpilot.report.figures.speed import draw_speed_by_size, draw_speedups, draw_step_costs, draw_time_split
from blockpilot.report.figures.style import NoFigureError, render
from blockpilot.report.run_data import Run

_CAPTIONS = tomllib.loads(Path(__file__).with_name("captions.toml").read_text(encoding="utf-8"))
_DRAWN_BY = {
    "speedups": draw_speedups,
    "speed-by-size": draw_speed_by_size,
    "tau-by-size": draw_tau_by_size,
    "best-sizes": draw_best_sizes,
    "acceptance": draw_acceptance,
    "time-split": draw_time_split,
    "step-costs": draw_step_costs,
}


def draw_figures(run: Run, prefix: str) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """The figures that the run has data for; of the others the title, and why they are missing."""
    figures, left_out = [], []
    for kind, draw in _DRAWN_BY.items():
        name = f"{prefix}{kind}"
        try:
            figures.append({"name": name, **_CAPTIONS[kind], "svg": render(draw, run, name)})
        except NoFigureError as error:
            left_out.append((_CAPTIONS[kind]["title"], str(error)))
    return figures, left_out
