"""`blockpilot report`: result rows -> Markdown, HTML and figures."""

import argparse
from pathlib import Path
from typing import Any

from blockpilot.cli.console import print_note, print_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `blockpilot bench` wrote")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the first RUN)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the files written")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.report.build import build_report

    files = build_report(arguments.runs, arguments.out or arguments.runs[0])
    value: dict[str, Any] = {
        "markdown": str(files.markdown),
        "html": str(files.html),
        "figures": [str(path) for path in files.figures],
        "left_out": [{"figure": title, "reason": reason} for title, reason in files.left_out],
    }
    if not arguments.json:
        for title, reason in files.left_out:
            print_note(f"left out: {title}, because {reason}")
    print_result(value, value["html"], value["markdown"], is_json=arguments.json)
    return 0
