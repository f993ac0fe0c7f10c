"""`blockpilot report`: result rows -> Markdown, HTML and figures."""

import argparse
from pathlib import Path

from blockpilot.cli.console import print_json, print_note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `blockpilot bench` wrote")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the first RUN)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the files written")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.report.build import build_report

    files = build_report(arguments.runs, arguments.out or arguments.runs[0])
    if arguments.json:
        print_json(
            {
                "markdown": str(files.markdown),
                "html": str(files.html),
                "figures": [str(path) for path in files.figures],
                "left_out": [{"figure": title, "reason": reason} for title, reason in files.left_out],
            }
        )
        return 0
    for title, reason in files.left_out:
        print_note(f"left out: {title}, because {reason}")
    print(files.html)
    print(files.markdown)
    return 0
