"""The report as Markdown, with links to the figures beside it."""

from collections.abc import Sequence

from blockpilot.report.content import Content, Section
from blockpilot.report.tables import Cell, Table


def write_markdown(content: Content) -> str:
    parts = [f"# {content.title}", content.lead]
    if content.overview is not None:
        parts += ["## All runs", _table(content.overview)]
    for section in content.sections:
        parts += _section(section)
    parts += ["## Published, other models", content.published_note, _table(content.published)]
    parts.append("## Manifests")
    for section in content.sections:
        parts.append(f"{section.run.name}:\n```json\n{section.run.manifest_text}\n```")
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {section.heading}", section.setting, _table(section.results), section.reading]
    parts += ["### Notes", "\n".join(f"* {note}" for note in section.notes)]
    for figure in section.figures:
        parts += [f"### {figure.title}", f"![{figure.title}](figures/{figure.file_name}.svg)", figure.caption]
    if section.left_out:
        parts.append("\n".join(f"* Left out: {title}, because {reason}." for title, reason in section.left_out))
    for title, table in section.tables:
        parts += [f"### {title}", _table(table)]
    return parts


def _table(table: Table) -> str:
    headings = _join_groups(table)
    rule = ["---" if cell.is_label else "--:" for cell in table.rows[0]]
    lines = [_line(headings), _line(rule)]
    return "\n".join(lines + [_line([_cell(cell) for cell in row]) for row in table.rows])


def _join_groups(table: Table) -> list[str]:
    """Markdown has one line of headings: the group's name goes before the first of its columns."""
    names = [name for name, width in table.groups for name in (name, *[""] * (width - 1))]
    if not names:
        return table.headings
    return [f"{name} {heading}".strip() for name, heading in zip(names, table.headings, strict=True)]


def _cell(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"**{text}**" if cell.is_best else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
