"""One answer, token by token: what each step drafted, what was accepted, and where the target spoke itself."""

from html import escape
from typing import Any

from blockpilot.report.run_data import Run, task_title

MAX_METHODS = 4
MAX_PROMPT = 600


def draw_answer(run: Run) -> str | None:
    """HTML of the first sample with the steps of the fastest methods; None where there is no sample."""
    sample = next((sample for sample in run.samples if len(sample["steps"]) > 1), None)
    if sample is None:
        return None
    methods = sorted(
        (method for method in sample["steps"] if method != "ar"),
        key=lambda method: -(run.value(sample["task"], method, "speedup") or 0),
    )
    prompt = sample["prompt"] if len(sample["prompt"]) <= MAX_PROMPT else sample["prompt"][:MAX_PROMPT] + " ..."
    blocks = [
        _draw_method(method, sample["pieces"], sample["steps"][method], is_open=place == 0)
        for place, method in enumerate(methods[:MAX_METHODS])
    ]
    return (
        f'<p class="prompt"><span class="label">{escape(task_title(sample["task"]))}, '
        f"{escape(str(sample['prompt_id']))}</span>{escape(prompt)}</p>\n" + _LEGEND + "\n".join(blocks)
    )


_LEGEND = (
    '<p class="legend"><span class="tokens"><i class="first">first token</i> from reading the prompt; '
    '<span class="step even"><i>drafted</i><i> and accepted</i></span>, shades change from step to step; '
    '<span class="step odd"><i class="own">the target\'s own token</i></span> ends each step.</span></p>\n'
)


def _draw_method(method: str, pieces: list[str], steps: dict[str, list[int]], *, is_open: bool) -> str:
    emitted = steps["emitted"]
    tau = sum(emitted) / len(emitted) if emitted else 0.0
    state = " open" if is_open else ""
    summary = f"{escape(method)}: {1 + sum(emitted)} tokens in {len(emitted)} steps, {tau:.2f} per step"
    return f"<details{state}><summary>{summary}</summary>\n<p class='tokens'>{draw_tokens(pieces, steps)}</p></details>"


def draw_tokens(pieces: list[str], steps: dict[str, list[int]]) -> str:
    """Every token as an element; those of a step together in one that names the step."""
    parts = [f'<i class="first" title="first token, from reading the prompt">{_show(pieces[0])}</i>'] if pieces else []
    place = 1
    sizes = zip(steps["block_sizes"], steps["verify_sizes"], steps["emitted"], strict=True)
    for number, (block, verify, emitted) in enumerate(sizes, start=1):
        tokens = pieces[place : place + emitted]
        inner = "".join(
            f'<i title="step {number}, position {depth} of {block - 1}: accepted">{_show(piece)}</i>'
            for depth, piece in enumerate(tokens[:-1], start=1)
        )
        own = f"step {number}: the target's own token; block size {block}, {verify} checked, {emitted} emitted"
        inner += f'<i class="own" title="{own}">{_show(tokens[-1])}</i>' if tokens else ""
        parts.append(f'<span class="step {"odd" if number % 2 else "even"}">{inner}</span>')
        place += emitted
    return "".join(parts)


def _show(piece: Any) -> str:
    """A line break keeps its place and is seen; a token that adds no text yet is a dot."""
    text = escape(str(piece)) or "·"
    return text.replace("\n", "↵\n")
