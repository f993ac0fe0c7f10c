"""The report as one HTML file that needs nothing else: styles and figures are inside. `page.html` is its template."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from blockpilot.report.content import LEAD, PUBLISHED_NOTE, READING, TITLE, Content
from blockpilot.report.run_data import Run, task_title
from blockpilot.report.tables import published_table

_MAX_METHODS = 4
_MAX_PROMPT = 600


def write_page(content: Content) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        title=TITLE,
        lead=LEAD,
        reading=READING,
        content=content,
        published=published_table(),
        published_note=PUBLISHED_NOTE,
        pick_answer=_pick_answer,
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
