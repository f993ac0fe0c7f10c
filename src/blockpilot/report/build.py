"""Result folders in, `report.md`, `report.html` and figures out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockpilot.core.files import write_text
from blockpilot.report.content import build_content
from blockpilot.report.markdown import write_markdown
from blockpilot.report.page import write_page
from blockpilot.report.run_data import read_run


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
    write_text(out / "report.md", write_markdown(content))
    write_text(out / "report.html", write_page(content))
    left_out = [entry for section in content.sections for entry in section.left_out]
    return ReportFiles(out / "report.md", out / "report.html", figures, left_out)
