"""Figures about accepted lengths: tau by block size, the best size of every prompt, acceptance by position."""

from collections import Counter
from collections.abc import Sequence
from itertools import count, takewhile

from matplotlib.figure import Figure

from blockpilot.report.figures.style import BLUE, ORANGE, NoFigureError, finish_lines, label, line_looks, make_axes
from blockpilot.report.run_data import Row, Run, task_title

_MAX_LINES = 8
_MIN_DRAFTED = 10  # a share of fewer drafts is left out


def draw_tau_by_size(run: Run, figure: Figure) -> None:
    sizes = run.fixed_sizes
    if len(sizes) < 2:
        raise NoFigureError("it needs dflash:B for two block sizes or more")
    axes = make_axes(figure, 3.1)
    for task, look in zip(run.tasks, line_looks(), strict=False):
        values = [run.value(task, method, "tau_mean") for method in sizes.values()]
        axes.plot(list(sizes), values, label=label(task_title(task)), **look)
    axes.set(xlabel="block size B", ylabel="τ, tokens per step")
    axes.set_ylim(bottom=1)
    finish_lines(axes, sizes)


def draw_best_sizes(run: Run, figure: Figure) -> None:
    """How many prompts each measured size serves best, by speed and by tau."""
    sizes = run.fixed_sizes
    if len(sizes) < 3:
        raise NoFigureError("it needs dflash:B for three block sizes or more")
    counts = {name: count_best(run, name) for name in ("tokens_per_second", "tau")}
    total = sum(counts["tokens_per_second"].values())
    if not total:
        raise NoFigureError("the rows hold nothing about single prompts")
    axes = make_axes(figure, 2.6)
    looks = {"tokens_per_second": ("most tokens/s", BLUE, "", -0.2), "tau": ("largest τ", ORANGE, "////", 0.2)}
    for name, (legend, colour, hatch, shift) in looks.items():
        places = [place + shift for place in range(len(sizes))]
        heights = [counts[name][size] for size in sizes]
        bars = axes.bar(places, heights, width=0.38, label=legend, color=colour, hatch=hatch, edgecolor="#333333")
        axes.bar_label(bars, fontsize=7.5, padding=1)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(xlabel="block size B", ylabel=f"prompts of {total}")
    axes.margins(y=0.15)
    axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), borderaxespad=0)


def count_best(run: Run, name: str) -> Counter[int]:
    """Of every prompt the size with the largest value; of equal ones the smallest."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for size, method in run.fixed_sizes.items():
        for row in run.of_method(method):
            for entry in row.get("per_prompt", ()):
                if entry[name] is not None:
                    values.setdefault((row["task"], entry["id"]), {})[size] = entry[name]
    return Counter(max(sorted(found), key=found.__getitem__) for found in values.values())


def draw_acceptance(run: Run, figure: Figure) -> None:
    """Share of drafts whose accepted path reached a position, of those that went so far; all tasks together."""
    shares = {method: acceptance(run.of_method(method)) for method in run.methods}
    known = {method: share for method, share in shares.items() if share}
    if not known:
        raise NoFigureError("the rows hold no counts by position")
    chosen = _choose_lines(list(known))
    axes = make_axes(figure, 3.1)
    for method, look in zip(chosen, line_looks(), strict=False):
        axes.plot(range(1, len(known[method]) + 1), known[method], label=label(method), **look)
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1))
    deepest = max(len(known[method]) for method in chosen)
    finish_lines(axes, range(1, deepest + 1, 1 if deepest <= 16 else 2))


def acceptance(rows: Sequence[Row]) -> list[float]:
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for row in rows:
        positions = row.get("positions") or {"drafted": [], "accepted": []}
        drafted.update(dict(enumerate(positions["drafted"])))
        accepted.update(dict(enumerate(positions["accepted"])))
    places = takewhile(lambda place: drafted[place] >= _MIN_DRAFTED, count())
    return [accepted[place] / drafted[place] for place in places]


def _choose_lines(methods: list[str]) -> list[str]:
    """At most as many lines as there are looks: the widest chain first, then the adaptive methods and the drafters."""
    chains = sorted((m for m in methods if m.startswith("dflash:")), key=lambda m: -int(m.partition(":")[2]))
    ranked = [*chains[:1], "auto", "step", "eagle3", "ngram", "blockpilot", "chain-step", "best-fixed", *methods]
    wanted = [method for method in dict.fromkeys(ranked) if method in methods][:_MAX_LINES]
    return [method for method in methods if method in wanted]
