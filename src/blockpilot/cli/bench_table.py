"""The table at the end of a benchmark: methods down, tasks across, speedup and tau in each cell."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def print_table(rows: Sequence[Row]) -> None:
    """The best of each column is bold."""
    from rich.console import Console
    from rich.table import Table

    tasks, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "method"))
    cells = {(row["task"], row["method"]): row for row in rows}
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column("method", no_wrap=True)
    for task in tasks:
        table.add_column(f"{task}\nspeedup  tau", justify="right", no_wrap=True)
    for method in methods:
        table.add_row(method, *(_cell(cells, task, method, methods) for task in tasks))
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # nobody watches: never cut a cell short
    console.print(table)
    console.print(_summary(rows), style="dim", highlight=False)


def _cell(cells: Mapping[tuple[str, str], Row], task: str, method: str, methods: Sequence[str]) -> str:
    parts = []
    for name, width in (("speedup", 7), ("tau_mean", 4)):
        value = cells[task, method][name]
        others = [cells[task, other][name] for other in methods if cells[task, other][name] is not None]
        text = ("-" if value is None else f"{value:.2f}").rjust(width)
        parts.append(f"[bold]{text}[/bold]" if others and value == max(others) else text)
    return " ".join(parts)


def _summary(rows: Sequence[Row]) -> str:
    tasks = [row for row in rows if row["task"] != "mean"]
    mismatches, near_ties = (sum(row[name] for row in tasks) for name in ("mismatches", "near_ties"))
    plain = [row for row in tasks if row["method"] == "ar"]
    num_prompts = sum(row["num_prompts"] for row in plain)
    return (
        f"speedup: decode tokens/s over plain decoding; tau: tokens per step; {num_prompts} prompts; "
        f"{mismatches} mismatches, {near_ties} near-ties"
    )
