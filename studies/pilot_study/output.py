"""Rows as Markdown tables and as two figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.core.files import atomic_path
from pilot_study.intervals import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]


def join_rows(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several runs over the same traces, each once; those of a load together."""
    rows = {json.dumps(row): row for part in parts for row in part}.values()
    loads = list(dict.fromkeys(row.get("load") for row in rows))  # None for rows without one
    return sorted(rows, key=lambda row: loads.index(row.get("load")))


def write_markdown(rows: Sequence[Row], trained: int) -> str:
    return "\n\n".join(
        text
        for text in (
            _optimal_table(_pick(rows, "optimal sizes"), trained),
            _split_table(_pick(rows, "split"), trained),
            _prefill_table(_pick(rows, "prefill"), trained),
            _load_table(_pick(rows, "load"), trained),
        )
        if text
    )


def _pick(rows: Sequence[Row], experiment: str) -> list[Row]:
    return [row for row in rows if row["experiment"] == experiment]


def _optimal_table(rows: Sequence[Row], trained: int) -> str:
    head = (
        "task",
        "requests",
        "best size: how often",
        "ties",
        f"best beats {trained} by less than 1 / 2 / 5 %",
        "oracle",
    )
    return markdown_table(
        "Optimal size of each request",
        head,
        [
            (
                row["task"],
                str(row["num_requests"]),
                ", ".join(f"{size}: {count}" for size, count in row["counts"].items() if count),
                f"{row['ties']:.0%}",
                " / ".join(f"{share:.0%}" for share in row["best_beats_trained"].values()),
                show(row["oracle_gain"]),
            )
            for row in rows
        ],
    )


def _split_table(rows: Sequence[Row], trained: int) -> str:
    head = (
        "split",
        "task",
        "requests",
        "same choice",
        f"over {trained}",
        "over best fixed",
        "the part's own oracle",
        "kept",
    )
    return markdown_table(
        "Size chosen on one part of the answer, judged on the other",
        head,
        [
            (
                row["split"],
                row["task"],
                str(row["num_requests"]),
                f"{row['same_choice']:.0%}",
                show(row["gain_over_trained"]),
                show(row["gain_over_best_fixed"]),
                show(row["oracle_gain_over_best_fixed"]),
                show(row["captured"], ".0%"),
            )
            for row in rows
        ],
    )


def _prefill_table(rows: Sequence[Row], trained: int) -> str:
    head = (
        "row",
        "task",
        "sizes",
        "tau",
        f"over {trained}",
        "over best fixed",
        "loop-free",
        "of the oracle's gain",
        "best named",
    )
    return markdown_table(
        "One size per request, chosen after prefill",
        head,
        [
            (
                row["name"],
                row["task"],
                _span(row["sizes"]),
                show(row["tau"], ".3f"),
                show(row["gain_over_trained"]),
                f"{show(row['gain_over_best_fixed'])} ({row['best_fixed']})",
                show(row["loop_free_gain_over_best_fixed"]),
                show(row["captured"], ".0%"),
                f"{row['accuracy']:.0%} ({row['accuracy_of_best_fixed']:.0%})",
            )
            for row in rows
        ],
    )


def _load_table(rows: Sequence[Row], trained: int) -> str:
    head = ("load", "method", "speed over plain", f"over {trained}", "over best fixed", "of the request oracle's gain")
    return markdown_table(
        "Under step costs",
        head,
        [
            (
                row["load"],
                row["name"],
                show(row["speedup"], ".2f"),
                show(row["gain_over_trained"]),
                show(row["gain_over_best_fixed"]),
                show(row.get("captured"), ".0%"),
            )
            for row in rows
        ],
    )


def markdown_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _span(sizes: Sequence[int]) -> str:
    is_window = list(sizes) == list(range(sizes[0], sizes[-1] + 1))
    return f"{sizes[0]}..{sizes[-1]}" if is_window else ", ".join(map(str, sizes))


def draw_figures(rows: Sequence[Row], out: Path, trained: int) -> list[Path]:
    """`optimal_sizes.svg` and `gains.svg`; nothing where the rows are of walks alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    optimal, prefill = _pick(rows, "optimal sizes"), _pick(rows, "prefill")
    if not optimal or not prefill:
        return []
    prefill = [row for row in prefill if row["task"] == prefill[0]["task"]]  # all tasks together
    paths = [out / "optimal_sizes.svg", out / "gains.svg"]
    with rc_context({"svg.hashsalt": "pilot", "font.size": 9}):  # the same rows give the same files
        spans = sorted({tuple(row["sizes"]) for row in optimal}, key=len, reverse=True)
        widths = [len(span) for span in spans]
        histogram = Figure(figsize=(10.5, 3.2), layout="constrained")
        places = histogram.subplots(1, len(spans), squeeze=False, width_ratios=widths)[0]
        for axes, span in zip(places, spans, strict=True):
            _draw_counts(axes, [row for row in optimal if tuple(row["sizes"]) == span])
        gains = Figure(figsize=(8, 1.2 + 0.27 * len(prefill)), layout="constrained")
        _draw_gains(gains.subplots(), prefill, trained)
        for figure, path in zip((histogram, gains), paths, strict=True):
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format="svg", metadata={"Date": None})
    return paths


def _draw_counts(axes: "Axes", rows: Sequence[Row]) -> None:
    """A row for each task, a column for each size; darker where more requests have their best."""
    labels = list(rows[0]["counts"])
    shares = [[100 * count / row["num_requests"] for count in row["counts"].values()] for row in rows]
    highest = max(map(max, shares))
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=highest, aspect="auto")
    for place, own in enumerate(shares):
        for column, share in enumerate(own):
            color = "white" if share > 0.6 * highest else "black"
            axes.text(column, place, f"{share:.0f}" if share else "", ha="center", va="center", color=color)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(rows)), [f"{row['task']} ({row['num_requests']})" for row in rows])
    axes.tick_params(length=0)
    axes.set(title=f"best of {len(labels)} sizes, %", xlabel="block size")


def _draw_gains(axes: "Axes", rows: Sequence[Row], trained: int) -> None:
    keys = {"gain_over_best_fixed": "over best fixed", "gain_over_trained": f"over fixed {trained}"}
    if all(row["gain_over_best_fixed"] == row["gain_over_trained"] for row in rows):
        keys = {"gain_over_trained": f"over fixed {trained}, which is the best fixed size"}
    for place, (key, label) in enumerate(keys.items()):
        values = [[100 * row[key][part] for part in ("value", "low", "high")] for row in rows]
        errors = [[abs(edge[0] - edge[side]) for edge in values] for side in (1, 2)]
        places = [index + (place - (len(keys) - 1) / 2) * 0.26 for index in range(len(rows))]
        means = [value for value, _, _ in values]
        axes.errorbar(
            means, places, xerr=errors, fmt="os"[place], color=("black", "grey")[place], capsize=2, label=label
        )
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set(title="gain of mean tau on test requests, 95 %", xlabel="%")
    axes.legend()
