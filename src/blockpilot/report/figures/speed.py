"""Figures about speed: speedups with their intervals, speed by block size, where a step's time goes."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockpilot.report.figures.style import BLACK, BLUE, GREY, LIGHT, LINES, ORANGE, RED, SKY, WIDTH, family
from blockpilot.report.run_data import Row, Run, task_title
from blockpilot.report.tables import format_speed, mean_or_only

PANELS_PER_LINE = 5
PARTS = {"draft": (ORANGE, "////"), "verify": (SKY, ""), "pilot": (RED, "xxxx"), "other": (LIGHT, "")}
LINE_COLOURS = {"ar": GREY, "ngram": BLACK}  # where the colour of bars is too light for a line


def draw_speedups(run: Run) -> Figure | str:
    """One panel per task: a bar per method, its interval, and the line of plain decoding."""
    methods = [method for method in run.methods if method != "ar"]
    if not methods:
        return "only plain decoding was measured"
    num_lines = math.ceil(len(run.columns) / PANELS_PER_LINE)
    width = min(PANELS_PER_LINE, len(run.columns))
    figure = Figure(figsize=(WIDTH, num_lines * (0.75 + 0.22 * len(methods))), layout="constrained")
    panels = figure.subplots(num_lines, width, squeeze=False, sharey=True, sharex=True).flatten().tolist()
    for axes, task in zip(panels, run.columns, strict=False):
        _draw_bars(axes, run, task, methods)
    for axes in panels[len(run.columns) :]:
        axes.set_axis_off()
    figure.supxlabel("times plain decoding", fontsize=8.5)
    return figure


def _draw_bars(axes: Axes, run: Run, task: str, methods: list[str]) -> None:
    best = max((run.value(task, method, "speedup") or 0 for method in methods), default=0)
    for place, method in enumerate(methods):
        speedup, interval = run.value(task, method, "speedup"), run.value(task, method, "speedup_ci")
        if speedup is None:
            continue
        colour, hatch = family(method)
        axes.barh(place, speedup, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.5, height=0.72)
        end = speedup
        if interval is not None:
            low, high = max(0.0, speedup - interval[0]), max(0.0, interval[1] - speedup)
            axes.errorbar(speedup, place, xerr=[[low], [high]], color=BLACK, capsize=2, linewidth=0.9)
            end = max(end, interval[1])
        label = axes.annotate(
            f"{speedup:.2f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7, zorder=5
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # readable across the dashed line
        label.set_fontweight("bold" if speedup == best else "normal")
    axes.axvline(1, color="#444444", linewidth=0.9, linestyle="--", zorder=4)
    axes.set_yticks(range(len(methods)), methods)
    axes.tick_params(axis="y", length=0)
    axes.set(title=task_title(task), ylim=(len(methods) - 0.4, -0.6))
    axes.margins(x=0.22)


def draw_speed_by_size(run: Run) -> Figure | str:
    """Mean tokens per second of fixed chains by block size, and the other methods as lines across."""
    sizes = run.fixed_sizes
    if len(sizes) < 2:
        return "it needs dflash:B for two block sizes or more"
    column = mean_or_only(run)
    others = _other_speeds(run, column)
    figure = Figure(figsize=(WIDTH, max(3.1, 0.7 + 0.19 * len(others))), layout="constrained")
    axes = figure.subplots()
    speeds = [run.value(column, method, "tokens_per_second") for method in sizes.values()]
    axes.plot(list(sizes), speeds, color=BLUE, marker="o", label="fixed chain, dflash:B")
    for place, (method, speed) in enumerate(others.items()):
        look = {"linestyle": LINES[place % len(LINES)], "linewidth": 1.6 if place < len(LINES) else 0.8}
        colour = LINE_COLOURS.get(method.partition(":")[0], family(method)[0])
        axes.axhline(speed, color=colour, label=f"{method}, {format_speed(speed)}", **look)
    choice = run.manifest.get("best_fixed")
    if choice and (speed := run.value(column, "best-fixed", "tokens_per_second")) is not None:
        axes.plot(choice["size"], speed, color=BLUE, marker="*", markersize=11, linestyle="")  # where it was chosen
    axes.set(xlabel="block size B", ylabel="tokens/s, mean of the tasks" if len(run.tasks) > 1 else "tokens/s")
    axes.set_xticks(list(sizes))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _other_speeds(run: Run, column: str) -> dict[str, float]:
    """Methods that are no fixed chains, the fastest first: so the legend has the order of the lines."""
    speeds = {method: run.value(column, method, "tokens_per_second") for method in run.methods}
    found = {m: s for m, s in speeds.items() if s is not None and not m.startswith("dflash:")}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def draw_time_split(run: Run) -> Figure | str:
    """Milliseconds of one step by part, tasks weighing the same."""
    splits = {method: _mean_split(run.of_method(method)) for method in run.methods}
    known = {method: split for method, split in splits.items() if split}
    if not known:
        return "the rows hold no times of steps"
    figure = Figure(figsize=(WIDTH, 0.75 + 0.26 * len(known)), layout="constrained")
    axes = figure.subplots()
    for part, (colour, hatch) in PARTS.items():
        values = [split[part] for split in known.values()]
        before = [sum(split[name] for name in list(PARTS)[: list(PARTS).index(part)]) for split in known.values()]
        look = {"color": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0.5}
        axes.barh(range(len(known)), values, left=before, height=0.7, label=part, **look)  # type: ignore[arg-type]
    for place, split in enumerate(known.values()):
        total = sum(split.values())
        axes.annotate(f"{total:.3g}", (total, place), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_yticks(range(len(known)), list(known))
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="milliseconds per step", ylim=(len(known) - 0.4, -0.6))
    axes.margins(x=0.08)
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    return figure


def _mean_split(rows: list[Row]) -> dict[str, float] | None:
    found = [row["milliseconds_per_step"] for row in rows if row.get("milliseconds_per_step")]
    if not found:
        return None
    return {part: sum(split[part] for split in found) / len(found) for part in PARTS}
