"""The tables of a report as plain cells, written out as Markdown or HTML elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockpilot.report.run_data import Run, mean_or_only, task_title

_EMPTY = "-"
PUBLISHED = (  # model, temperature; speedup and tau of EAGLE-3, DFlash and BlockPilot
    ("Qwen3-4B", 0, ((1.70, 2.95), (3.99, 6.31), (4.17, 6.59))),
    ("Qwen3-4B", 1, ((1.70, 2.88), (3.80, 5.35), (4.20, 5.92))),
    ("Qwen3-8B", 0, ((1.75, 2.93), (4.42, 6.13), (4.66, 6.46))),
    ("Qwen3-8B", 1, ((1.65, 2.77), (3.55, 5.00), (3.94, 5.55))),
    ("Llama-3.1-8B", 0, (None, (3.03, 4.48), (3.25, 4.82))),
    ("Qwen3-Coder-30B-A3B", 0, (None, (3.86, 5.68), (4.12, 6.05))),
)


@dataclass(frozen=True)
class Cell:
    text: str
    is_best: bool = False
    is_label: bool = False


@dataclass(frozen=True)
class Table:
    groups: list[tuple[str, int]]  # headings over several columns, with their widths
    headings: list[str]
    rows: list[list[Cell]]

    @property
    def flat_headings(self) -> list[str]:
        """On one line, for Markdown: the group's name goes before the first of its columns."""
        if not self.groups:
            return self.headings
        names = [name for name, width in self.groups for name in (name, *[""] * (width - 1))]
        return [f"{name} {heading}".strip() for name, heading in zip(names, self.headings, strict=True)]


def results_table(run: Run) -> Table:
    """Methods down, tasks across; speedup and tau of each, the best of every column marked."""
    groups = [("", 1)] + [(task_title(task), 2) for task in run.columns]
    headings = ["Method"] + ["Speedup", "τ"] * len(run.columns)
    rows = []
    for method in run.methods:
        cells = [Cell(method, is_label=True)]
        for task in run.columns:
            for name, suffix in (("speedup", "x"), ("tau_mean", "")):
                known = run.known(task, name)
                is_best = method in known and known[method] == max(known.values())
                cells.append(Cell(_format(known.get(method), ".2f", suffix), is_best=is_best))
        rows.append(cells)
    return Table(groups, headings, rows)


def overview_table(runs: Sequence[Run], headings: Sequence[str]) -> Table:
    """A row for each run: the mean of its tasks, or the only one."""
    columns = ["Run", "Prompts", "Plain, tokens/s", "Best fixed size", "Best method", "auto", "95 % interval"]
    rows = []
    for run, heading in zip(runs, headings, strict=True):
        task = mean_or_only(run)
        speeds, plain = run.known(task, "speedup"), run.value(task, "ar", "tokens_per_second")
        cells = [
            str(sum(row["num_prompts"] for row in run.of_method("ar"))),
            _EMPTY if plain is None else format_speed(plain),
            _fastest({method: speeds[method] for method in run.fixed_sizes.values() if method in speeds}),
            _fastest(speeds),
            _format(speeds.get("auto"), ".2f", "x"),
            format_interval(run.value(task, "auto", "speedup_ci")),
        ]
        rows.append(_row(heading, *cells))
    return Table([], columns, rows)


def _fastest(speeds: Mapping[str, float]) -> str:
    name = max(speeds, key=speeds.__getitem__, default=None)
    return _EMPTY if name is None else f"{name} {speeds[name]:.2f}x"


def _row(label: str, *cells: str) -> list[Cell]:
    return [Cell(label, is_label=True), *map(Cell, cells)]


def _format(value: float | None, form: str, suffix: str = "") -> str:
    return _EMPTY if value is None else f"{value:{form}}{suffix}"


_DETAILS = (
    ("num_prompts", "Prompts", "d"),
    ("num_tokens", "Tokens", "d"),
    ("tau_mean", "τ mean", ".2f"),
    ("tau_pooled", "τ pooled", ".2f"),
    ("tau_loop_free", "τ loop-free", ".2f"),
    ("loop_share", "Loops", ".0%"),
    ("tokens_per_second", "Tokens/s", ".1f"),
    ("speedup", "Speedup", ".2f"),
    ("speedup_ci", "95 % interval", ""),
    ("end_to_end_speedup", "End to end", ".2f"),
    ("time_to_first_token", "First token, ms", ".1f"),
    ("mismatches", "Mismatches", "d"),
    ("near_ties", "Near-ties", "d"),
)


def details_table(run: Run) -> Table:
    """Every row with its interval and the other ways to count."""
    rows = []
    for row in run.rows:
        cells = [Cell(task_title(row["task"]), is_label=True), Cell(row["method"], is_label=True)]
        for name, _, form in _DETAILS:
            value = row.get(name)
            if name == "time_to_first_token" and value is not None:
                value *= 1e3  # rows hold seconds
            cells.append(Cell(format_interval(value) if name == "speedup_ci" else _format(value, form)))
        rows.append(cells)
    return Table([], ["Task", "Method", *(title for _, title, _ in _DETAILS)], rows)


def scores_table(run: Run) -> Table | None:
    """Share of right answers, where a task was scored. All lossless methods score alike, so plain decoding stands."""
    found = [row for row in run.of_method("ar") if row.get("num_scored") and row.get("score") is not None]
    if not found:
        return None
    rows = [_row(task_title(row["task"]), f"{row['score']:.0%}", str(row["num_scored"])) for row in found]
    return Table([], ["Task", "Right", "Scored"], rows)


def published_table() -> Table:
    """What the BlockPilot paper (arXiv 2606.31315) reports: means over its tasks on an H100, 2048 new tokens.

    Other models on another machine, so no row to compare ours with.
    """
    groups = [("", 2)] + [(name, 2) for name in ("EAGLE-3", "DFlash (16)", "BlockPilot")]
    headings = ["Model", "T"] + ["Speedup", "τ"] * 3
    rows = []
    for model, temperature, pairs in PUBLISHED:
        cells = _row(model, str(temperature))
        for pair in pairs:
            speedup, tau = pair or (None, None)
            cells += [Cell(_format(speedup, ".2f", "x")), Cell(_format(tau, ".2f"))]
        rows.append(cells)
    return Table(groups, headings, rows)


def best_fixed_table(run: Run) -> Table | None:
    """What was chosen on calibration prompts, for all tasks and for each alone, and the best in hindsight."""
    choice, tree = run.manifest.get("best_fixed"), run.manifest.get("best_fixed_tree")
    hindsight = {row["task"]: row.get("best_fixed_of_task") for row in run.of_method("ar")}
    if choice is None and tree is None and not any(hindsight.values()):
        return None
    rows = []
    for task in run.tasks:
        known = hindsight.get(task)
        chosen = [str(choice["size_by_task"].get(task, _EMPTY)) if choice else _EMPTY]
        chosen += [tree["method_by_task"].get(task, _EMPTY)] if tree else []
        best = _EMPTY if known is None else f"{known['method'].partition(':')[2]} ({known['speedup']:.2f}x)"
        rows.append(_row(task_title(task), *chosen, best))
    if choice or tree:
        cells = [Cell(str(choice["size"]), is_best=True) if choice else Cell(_EMPTY)]
        cells += [Cell(tree["method"], is_best=True)] if tree else []
        rows.append([Cell("All tasks", is_label=True), *cells, Cell(_EMPTY)])
    chosen_on = "Chosen on calibration prompts"
    headings = [f"{chosen_on}: size", f"{chosen_on}: tree"] if tree else [chosen_on]
    return Table([], ["Task", *headings, "Fastest measured on test, in hindsight"], rows)


def format_interval(interval: Sequence[float] | None) -> str:
    return _EMPTY if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def format_speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}"
