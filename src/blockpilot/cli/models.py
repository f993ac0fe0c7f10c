"""`blockpilot models`: what is known by name, whether it is here and unharmed, and how to take it elsewhere."""

import argparse
from pathlib import Path
from typing import Any

from blockpilot.cli.console import format_megabytes, print_columns, print_json, print_result, show_progress

_ACTIONS = {
    "list": "show every model known by name",
    "fetch": "download a model unless it is here already",
    "verify": "compute a model's checksum again and compare",
    "export": "write a target as a Hugging Face folder, or a shipped drafter in its public format",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, purpose in _ACTIONS.items():
        action = actions.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", allow_abbrev=False
        )
        action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == "export":
            export_help = "preset, Hugging Face folder, GGUF file, hub id or shipped drafter"
            action.add_argument("name", metavar="NAME", help=export_help)
            out_help = "the folder to write; new or empty"
            action.add_argument("--out", type=Path, required=True, metavar="DIR", help=out_help)
        elif name != "list":
            action.add_argument("name", metavar="NAME", help="a name that `blockpilot models list` shows")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        _list(is_json=arguments.json)
    else:
        value, line = {"fetch": _fetch, "verify": _verify, "export": _export}[arguments.action](arguments)
        print_result(value, line, is_json=arguments.json)
    return 0


def _list(*, is_json: bool) -> None:
    rows = _known_models()
    if is_json:
        print_json({"models": rows})
        return
    columns = {
        "name": [row["name"] for row in rows],
        "kind": [row["kind"] for row in rows],
        "size": [format_megabytes(row["bytes"]) for row in rows],
        "cached": ["yes" if row["cached"] else "no" for row in rows],
        "path": [row["path"] or "-" for row in rows],
    }
    print_columns(columns)


def _fetch(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from blockpilot.models.presets import fetch_preset
    from blockpilot.models.shipped import shipped_folder

    name = arguments.name
    if (folder := shipped_folder(name)) is not None:
        return _find_row(name), f"{name} ships with the package: {folder}"
    with show_progress(f"fetching {name}") as progress:
        path = fetch_preset(name, progress)
    return _find_row(name), f"{name} is at {path}"


def _verify(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from blockpilot.models.presets import verify_preset
    from blockpilot.models.shipped import shipped_folder, verify_shipped

    name = arguments.name
    with show_progress(f"verifying {name}"):
        path = verify_preset(name) if shipped_folder(name) is None else verify_shipped(name)
    return _find_row(name), f"{name} is unharmed at {path}"


def _export(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from blockpilot.models.shipped import shipped_folder

    name, is_drafter = arguments.name, shipped_folder(arguments.name) is not None
    with show_progress(f"exporting {name}") as progress:
        from blockpilot.models.export import export_drafter, export_target

        folder = export_drafter(name, arguments.out) if is_drafter else export_target(name, arguments.out, progress)
    facts = {"name": name, "kind": "drafter" if is_drafter else "target", "path": str(folder)}
    return facts, f"{name} is written to {folder}"


def _known_models() -> list[dict[str, Any]]:
    from blockpilot.models.presets import list_presets
    from blockpilot.models.shipped import list_shipped

    return list_presets() + list_shipped()


def _find_row(name: str) -> dict[str, Any]:
    return next(row for row in _known_models() if row["name"] == name)
