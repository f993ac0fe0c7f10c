"""Result folders in; `report.md`, `report.html` and figures out. `page.md` and `page.html` are their templates."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from blockpilot.core.files import write_text
from blockpilot.core.locks import command_name, hold_folder
from blockpilot.report import tables
from blockpilot.report.markdown import escape_paragraph, escape_text, fence_for
from blockpilot.report.notes import write_notes
from blockpilot.report.run_data import Run, read_run, task_title

_MAX_METHODS = 4  # of the answer that is shown block by block
_MAX_PROMPT = 600  # characters


def build_report(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the report; returns the paths of its files, and which figures were left out for which reason."""
    runs = [read_run(folder) for folder in folders]
    is_mixed = len({run.device for run in runs}) > 1
    headings = [f"{run.title}, {run.device}" if is_mixed else run.title for run in runs]
    sections = [
        _build_section(run, heading, f"{place}-" if len(runs) > 1 else "")
        for place, (run, heading) in enumerate(zip(runs, headings, strict=True), start=1)
    ]
    figures = {
        out / "figures" / f"{figure['name']}.svg": figure["svg"] for one in sections for figure in one["figures"]
    }
    overview = tables.overview_table(runs, headings) if len(runs) > 1 else None
    environment, shown = _make_environment(), {"overview": overview, "sections": sections}
    shown |= {"published": tables.published_table()}
    with hold_folder(out, command_name()):
        for path, svg in figures.items():
            write_text(path, svg + "\n")
        for name in ("md", "html"):  # the Markdown links to the figures beside it; the HTML needs no other file
            write_text(out / f"report.{name}", environment.get_template(f"page.{name}").render(shown))
    return {
        "markdown": str(out / "report.md"),
        "html": str(out / "report.html"),
        "figures": [str(path) for path in figures],
        "left_out": [{"figure": title, "reason": reason} for one in sections for title, reason in one["left_out"]],
    }


def _make_environment() -> Environment:
    """HTML escapes every value by itself, in Markdown each one names its filter."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": escape_text, "paragraph": escape_paragraph, "fence": fence_for}
    return environment


def _build_section(run: Run, heading: str, prefix: str) -> dict[str, Any]:
    """What the templates show of one run."""
    if importlib.util.find_spec("matplotlib") is None:
        missing = "matplotlib is not installed (pip install 'blockpilot[figures]')"
        drawn: tuple[list[dict[str, str]], list[tuple[str, str]]] = ([], [("all figures", missing)])
    else:
        from blockpilot.report.figures.catalogue import draw_figures

        drawn = draw_figures(run, prefix)
    found = {
        "Block sizes": tables.best_fixed_table(run),
        "Right answers": tables.scores_table(run),
        "All rows": tables.details_table(run),
    }
    return {
        "run": run,
        "heading": heading,
        "setting": _describe_setting(run),
        "results": tables.results_table(run),
        "notes": write_notes(run),
        "figures": drawn[0],
        "left_out": drawn[1],
        "tables": [(title, table) for title, table in found.items() if table is not None],
        "answer": _pick_answer(run),
    }


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


def _pick_answer(run: Run) -> dict[str, Any] | None:
    """The first sample token by token, with the steps of the fastest methods; None where there is no sample."""
    sample = next((sample for sample in run.samples if len(sample["steps"]) > 1), None)
    if sample is None:
        return None
    methods = sorted(
        (method for method in sample["steps"] if method != "ar"),
        key=lambda method: -(run.value(sample["task"], method, "speedup") or 0),
    )
    # a line break keeps its place and is seen; a token that adds no text yet is a dot
    tokens = [str(piece).replace("\n", "↵\n") or "·" for piece in sample["pieces"]]
    prompt = sample["prompt"]
    return {
        "title": f"{task_title(sample['task'])}, {sample['prompt_id']}",
        "prompt": prompt if len(prompt) <= _MAX_PROMPT else prompt[:_MAX_PROMPT] + " ...",
        "first": tokens[:1],
        "methods": [_split_steps(method, tokens[1:], sample["steps"][method]) for method in methods[:_MAX_METHODS]],
    }


def _split_steps(method: str, tokens: list[str], steps: dict[str, list[int]]) -> dict[str, Any]:
    """What each step drafted, what was accepted, and where the target spoke itself."""
    found, place = [], 0
    for block, verify, emitted in zip(steps["block_sizes"], steps["verify_sizes"], steps["emitted"], strict=True):
        own = tokens[place : place + emitted]
        found.append({"tokens": own, "block_size": block, "verify_size": verify, "emitted": emitted})
        place += emitted
    tau = place / len(found) if found else 0.0
    return {"summary": f"{method}: {1 + place} tokens in {len(found)} steps, {tau:.2f} per step", "steps": found}
