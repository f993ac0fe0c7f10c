"""Result folders in, `report.md`, `report.html` and figures out. Markdown is written here, HTML in `page.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockpilot.core.files import write_text
from blockpilot.report.content import LEAD, PUBLISHED_NOTE, READING, TITLE, Content, Section, build_content
from blockpilot.report.page import write_page
from blockpilot.report.run_data import read_run
from blockpilot.report.tables import Cell, Table, published_table


@dataclass(frozen=True)
class ReportFiles:
    markdown: Path
    html: Path
    figures: list[Path]
    left_out: list[tuple[str, str]]


def build_report(folders: Sequence[Path], out: Path) -> ReportFiles:
    content = build_content([read_run(folder) for folder in folders])
    figures = []
    for section in content.sections:
        for figure in section.figures:
            path = out / "figures" / f"{figure.file_name}.svg"
            write_text(path, figure.svg + "\n")
            figures.append(path)
    write_text(out / "report.md", _write_markdown(content))
    write_text(out / "report.html", write_page(content))
    left_out = [entry for section in content.sections for entry in section.left_out]
    return ReportFiles(out / "report.md", out / "report.html", figures, left_out)


def _write_markdown(report: Content) -> str:
    """With links to the figures beside it."""
    parts = [f"# {TITLE}", LEAD]
    if report.overview is not None:
        parts += ["## All runs", _table(report.overview)]
    for section in report.sections:
        parts += _section(section)
    parts += ["## Published, other models", PUBLISHED_NOTE, _table(published_table()), "## Manifests"]
    parts += [f"{section.run.name}:\n```json\n{section.run.manifest_text}\n```" for section in report.sections]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {section.heading}", section.setting, _table(section.results), READING]
    parts += ["### Notes", "\n".join(f"* {note}" for note in section.notes)]
    for figure in section.figures:
        title = figure.kind.title
        parts += [f"### {title}", f"![{title}](figures/{figure.file_name}.svg)", figure.kind.caption]
    if section.left_out:
        parts.append("\n".join(f"* Left out: {title}, because {reason}." for title, reason in section.left_out))
    for title, table in section.tables:
        parts += [f"### {title}", _table(table)]
    return parts


def _table(table: Table) -> str:
    rule = ["---" if cell.is_label else "--:" for cell in table.rows[0]]
    lines = [_join_groups(table), rule, *([_cell(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _join_groups(table: Table) -> list[str]:
    """Markdown has one line of headings: the group's name goes before the first of its columns."""
    names = [name for name, width in table.groups for name in (name, *[""] * (width - 1))]
    if not names:
        return table.headings
    return [f"{name} {heading}".strip() for name, heading in zip(names, table.headings, strict=True)]


def _cell(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"**{text}**" if cell.is_best else text
