"""`blockpilot report`: result rows -> Markdown, HTML and figures."""

import argparse
from pathlib import Path

from blockpilot.cli.console import print_note, print_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders that `blockpilot bench` wrote")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the first RUN)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the files written")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.report.build import build_report

    files = build_report(arguments.runs, arguments.out or arguments.runs[0])
    if not arguments.json:
        for one in files["left_out"]:
            print_note(f"left out: {one['figure']}, because {one['reason']}")
    print_result(files, files["html"], files["markdown"], is_json=arguments.json)
    return 0
