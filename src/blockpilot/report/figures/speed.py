"""Figures about speed: speedups with their intervals, speed by block size, a step's time and what it costs."""

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from blockpilot.report.figures import style
from blockpilot.report.run_data import Row, Run, mean_or_only, task_title
from blockpilot.report.tables import format_speed

_PANELS_PER_LINE = 5
_PARTS = {"draft": (style.ORANGE, "////"), "verify": (style.SKY, ""), "pilot": (style.RED, "xxxx")}
_PARTS |= {"other": (style.LIGHT, "")}
_LINE_COLOURS = {"ar": style.GREY, "ngram": style.BLACK}  # where the colour of bars is too light for a line
_COSTS = {"verify": "checking, anchor included", "draft": "drafting, by block size"}


def draw_speedups(run: Run, figure: Figure) -> None:
    """One panel per task: a bar per method, its interval, and the line of plain decoding."""
    methods = [method for method in run.methods if method != "ar"]
    if not methods:
        raise style.NoFigureError("only plain decoding was measured")
    num_lines = math.ceil(len(run.columns) / _PANELS_PER_LINE)
    width = min(_PANELS_PER_LINE, len(run.columns))
    figure.set_size_inches(style.WIDTH, num_lines * (0.75 + 0.22 * len(methods)))
    panels = figure.subplots(num_lines, width, squeeze=False, sharey=True, sharex=True).flatten().tolist()
    for axes, task in zip(panels, run.columns, strict=False):
        _draw_bars(axes, run, task, methods)
    for axes in panels[len(run.columns) :]:
        axes.set_axis_off()
    figure.supxlabel("times plain decoding", fontsize=8.5)


def _draw_bars(axes: Axes, run: Run, task: str, methods: list[str]) -> None:
    speedups = run.known(task, "speedup")
    best = max((speedups.get(method, 0) for method in methods), default=0)
    for place, method in enumerate(methods):
        if (speedup := speedups.get(method)) is None:
            continue
        interval = run.value(task, method, "speedup_ci")
        colour, hatch = style.family(method)
        axes.barh(place, speedup, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.5, height=0.72)
        end = speedup
        if interval is not None:
            low, high = max(0.0, speedup - interval[0]), max(0.0, interval[1] - speedup)
            axes.errorbar(speedup, place, xerr=[[low], [high]], color=style.BLACK, capsize=2, linewidth=0.9)
            end = max(end, interval[1])
        label = axes.annotate(
            f"{speedup:.2f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7, zorder=5
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # readable across the dashed line
        label.set_fontweight("bold" if speedup == best else "normal")
    axes.axvline(1, color="#444444", linewidth=0.9, linestyle="--", zorder=4)
    style.finish_bars(axes, methods)
    axes.set_title(style.label(task_title(task)))
    axes.margins(x=0.22)


def draw_speed_by_size(run: Run, figure: Figure) -> None:
    """Mean tokens per second of fixed chains by block size, and the other methods as lines across."""
    sizes = run.fixed_sizes
    if len(sizes) < 2:
        raise style.NoFigureError("it needs dflash:B for two block sizes or more")
    column = mean_or_only(run)
    known = run.known(column, "tokens_per_second")
    others = [method for method in sorted(known, key=known.__getitem__, reverse=True) if method not in sizes.values()]
    axes = style.make_axes(figure, max(3.1, 0.7 + 0.19 * len(others)))
    speeds = [run.value(column, method, "tokens_per_second") for method in sizes.values()]
    axes.plot(list(sizes), speeds, color=style.BLUE, marker="o", label="fixed chain, dflash:B")
    for number, method in enumerate(others):  # the fastest first: so the legend has the order of the lines
        turn, place = divmod(number, len(style.LINES))
        look = {"linestyle": style.LINES[place], "linewidth": 0.8 if turn else 1.6}
        colour = _LINE_COLOURS.get(method.partition(":")[0], style.family(method)[0])
        axes.axhline(known[method], color=colour, label=f"{style.label(method)}, {format_speed(known[method])}", **look)
    choice = run.manifest.get("best_fixed")
    if choice and (speed := run.value(column, "best-fixed", "tokens_per_second")) is not None:
        # where it was chosen
        axes.plot(choice["size"], speed, color=style.BLUE, marker="*", markersize=11, linestyle="")
    axes.set(xlabel="block size B", ylabel="tokens/s, mean of the tasks" if len(run.tasks) > 1 else "tokens/s")
    axes.set_ylim(bottom=0)
    style.finish_lines(axes, sizes)


def draw_time_split(run: Run, figure: Figure) -> None:
    """Milliseconds of one step by part, tasks weighing the same."""
    splits = {method: _mean_split(run.of_method(method)) for method in run.methods}
    known = {method: split for method, split in splits.items() if split}
    if not known:
        raise style.NoFigureError("the rows hold no times of steps")
    axes = style.make_axes(figure, 0.75 + 0.26 * len(known))
    before = [0.0] * len(known)
    for part, (colour, hatch) in _PARTS.items():
        values = [split[part] for split in known.values()]
        look = {"color": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0.5}
        axes.barh(range(len(known)), values, left=before, height=0.7, label=part, **look)  # type: ignore[arg-type]
        before = [start + value for start, value in zip(before, values, strict=True)]
    for place, split in enumerate(known.values()):
        total = sum(split.values())
        axes.annotate(f"{total:.3g}", (total, place), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    style.finish_bars(axes, list(known))
    axes.set_xlabel("milliseconds per step")
    axes.margins(x=0.08)
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def _mean_split(rows: list[Row]) -> dict[str, float] | None:
    found = [row["milliseconds_per_step"] for row in rows if row.get("milliseconds_per_step")]
    if not found:
        return None
    return {part: sum(split[part] for split in found) / len(found) for part in _PARTS}


def draw_step_costs(run: Run, figure: Figure) -> None:
    sessions = [session for session in run.manifest.get("sessions", []) if "step_costs" in session]
    if not sessions:
        raise style.NoFigureError("no method of this run weighs step costs")
    costs: Mapping[str, Any] = sessions[-1]["step_costs"]
    figure.set_size_inches(style.WIDTH, 2.8)
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), _COSTS.items(), strict=True):
        places = sorted({(point["batch_size"], point["context_length"]) for point in costs[kind]})
        for (batch, context), look in zip(places, style.line_looks(), strict=False):
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
