"""What a report says, before it is written as Markdown or HTML."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockpilot.report import tables
from blockpilot.report.notes import write_notes
from blockpilot.report.run_data import Run
from blockpilot.report.tables import Table

if TYPE_CHECKING:
    from blockpilot.report.figures.catalogue import DrawnFigure

TITLE = "BlockPilot benchmark"
LEAD = (
    "Speedup is decode tokens per second over plain decoding by the same engine in the same run; every draft counts, "
    "reading the prompt does not. τ is the number of tokens a step emits. Methods took turns on every prompt, in a "
    "shuffled order."
)
PUBLISHED_NOTE = (
    "From the BlockPilot paper (arXiv 2606.31315), means over its tasks on an H100. Models, drafters and machine "
    "differ, so these figures stand beside ours and not against them."
)
READING = "Best of each column in bold. τ is the mean of the answers' means."


@dataclass(frozen=True)
class Section:
    """One run."""

    run: Run
    heading: str
    setting: str
    results: Table
    notes: list[str]
    figures: "list[DrawnFigure]"
    left_out: list[tuple[str, str]]  # title of a figure, why it is missing
    tables: list[tuple[str, Table]]


@dataclass(frozen=True)
class Content:
    overview: Table | None  # of several runs
    sections: list[Section]


def build_content(runs: Sequence[Run]) -> Content:
    has_many = len(runs) > 1
    is_mixed = len({run.device for run in runs}) > 1
    headings = [f"{run.title}, {run.device}" if is_mixed else run.title for run in runs]
    sections = [
        _build_section(run, heading, f"{place}-" if has_many else "")
        for place, (run, heading) in enumerate(zip(runs, headings, strict=True), start=1)
    ]
    return Content(tables.overview_table(runs, headings) if has_many else None, sections)


def _build_section(run: Run, heading: str, prefix: str) -> Section:
    if importlib.util.find_spec("matplotlib") is None:
        figures: list[DrawnFigure] = []
        left_out = [("all figures", "matplotlib is not installed (pip install 'blockpilot[figures]')")]
    else:
        from blockpilot.report.figures.catalogue import draw_figures

        figures, left_out = draw_figures(run, prefix)
    found = {
        "Block sizes": tables.best_fixed_table(run),
        "Right answers": tables.scores_table(run),
        "All rows": tables.details_table(run),
    }
    return Section(
        run=run,
        heading=heading,
        setting=_describe_setting(run),
        results=tables.results_table(run),
        notes=write_notes(run),
        figures=figures,
        left_out=left_out,
        tables=[(title, table) for title, table in found.items() if table is not None],
    )


def _describe_setting(run: Run) -> str:
    manifest = run.manifest
    arguments = manifest.get("arguments", {})
    drafters = ", ".join(drafter["name"] for drafter in manifest.get("drafters", {}).values()) or "none"
    counts = sorted({row["num_prompts"] for row in run.of_method("ar")})
    prompts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
    word = "prompt" if counts == [1] else "prompts"
    repeats = arguments.get("repeats", 1)
    times = f", each {repeats} times" if repeats > 1 else ""
    threads = f", {manifest['num_threads']} threads" if "num_threads" in manifest else ""
    return (
        f"{run.device}{threads}, {manifest.get('dtype', 'unknown dtype')}; target "
        f"{run.rows[0]['model']}, drafters {drafters}; {prompts} {arguments.get('split', 'test')} {word} per task, up "
        f"to {arguments.get('max_new_tokens', '?')} new tokens{times}."
    )
