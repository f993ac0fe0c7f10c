"""`blockpilot models`: what is known by name, whether it is here and unharmed, and how to take it elsewhere."""

import argparse
from pathlib import Path
from typing import Any

from blockpilot.cli.console import format_megabytes, print_columns, print_json, show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    _add_action(actions, "list", "show every model known by name")
    fetch = _add_action(actions, "fetch", "download a model unless it is here already")
    verify = _add_action(actions, "verify", "compute a model's checksum again and compare")
    export = _add_action(
        actions, "export", "write a target as a Hugging Face folder, or a shipped drafter in its public format"
    )
    for action in (fetch, verify):
        action.add_argument("name", metavar="NAME", help="a name that `blockpilot models list` shows")
    export.add_argument(
        "name", metavar="NAME", help="preset, Hugging Face folder, GGUF file, hub id or shipped drafter"
    )
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write; new or empty")


def _add_action(actions: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", allow_abbrev=False
    )
    action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return action


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "list":
            _list(is_json=arguments.json)
        case "fetch":
            _fetch(arguments.name, is_json=arguments.json)
        case "verify":
            _verify(arguments.name, is_json=arguments.json)
        case "export":
            _export(arguments.name, arguments.out, is_json=arguments.json)
    return 0


def _list(*, is_json: bool) -> None:
    from blockpilot.models.presets import list_presets
    from blockpilot.models.shipped import list_shipped

    rows = list_presets() + list_shipped()
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


def _fetch(name: str, *, is_json: bool) -> None:
    from blockpilot.models.presets import fetch_preset
    from blockpilot.models.shipped import shipped_folder

    if (folder := shipped_folder(name)) is not None:
        _print_row(name, f"{name} ships with the package: {folder}", is_json=is_json)
        return

    with show_progress(f"fetching {name}") as progress:
        path = fetch_preset(name, progress)
    _print_row(name, f"{name} is at {path}", is_json=is_json)


def _verify(name: str, *, is_json: bool) -> None:
    from blockpilot.models.presets import verify_preset
    from blockpilot.models.shipped import shipped_folder, verify_shipped

    if shipped_folder(name) is not None:
        _print_row(name, f"{name} is unharmed at {verify_shipped(name)}", is_json=is_json)
        return

    with show_progress(f"verifying {name}"):
        path = verify_preset(name)
    _print_row(name, f"{name} is unharmed at {path}", is_json=is_json)


def _print_row(name: str, message: str, *, is_json: bool) -> None:
    from blockpilot.models.presets import list_presets
    from blockpilot.models.shipped import list_shipped

    if is_json:
        print_json(next(row for row in list_presets() + list_shipped() if row["name"] == name))
    else:
        print(message)


def _export(name: str, out: Path, *, is_json: bool) -> None:
    from blockpilot.models.shipped import shipped_folder

    is_drafter = shipped_folder(name) is not None
    with show_progress(f"exporting {name}") as progress:
        from blockpilot.models.export import export_drafter, export_target

        folder = export_drafter(name, out) if is_drafter else export_target(name, out, progress)
    if is_json:
        print_json({"name": name, "kind": "drafter" if is_drafter else "target", "path": str(folder)})
    else:
        print(f"{name} is written to {folder}")
