"""The report: Table 2 in the paper's layout, figures 3a to 3c and Table 1 by replay, the pilot, and every claim."""

import os.path
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pilot_study.intervals import show
from pilot_study.output import markdown_table

from blockpilot.bench.methods import PAPER
from blockpilot.report.markdown import escape_text
from blockpilot.report.run_data import Run, task_title
from blockpilot.report.tables import PUBLISHED, Table, format_interval, results_table, scores_table
from paper_study.claims import best_sizes, judge, near_shares, swept_sizes
from paper_study.evidence import Evidence, Half, mean_or
from paper_study.plan import FIXED_SIZES, methods_of, name_of

_SOURCE = "Zhang et al., BlockPilot, arXiv 2606.31315"
_READING = (
    "The paper's figures 3a to 3c and its Table 1 were not at hand when this was written. They are read as what its "
    "text rests on: tau by block size (3a), which size is best how often (3b), how many best sizes lie near the "
    "trained one (3c); and Table 1 as tau at fixed sizes beside the best size of every request."
)
_DIFFERENCES = (
    "Every size is replayed on the same text: the paper measured one generation per size.",
    "A speedup's clock has every draft in it; the released harness starts behind the first.",
    "At T = 1 drafts are drawn with the noise that the target's tokens are drawn with; the released code drafts the "
    "likeliest tokens.",
    "`best-fixed` and `best-fixed-tree` are chosen on calibration prompts that nothing else sees.",
    "The network has the released code's layers, dropout of 0.2, initialisation and bfloat16 on a GPU. How it was "
    "trained is not released: AdamW at 3e-4, 1,500 steps of 64 requests, in float32, are ours. There is a pilot per "
    "temperature: the released program names its weights `mlp_T0.0`, so this is likely, not known.",
    "Its inputs are whole probabilities, as in the paper's text; the released code writes raw logits, which are judged "
    "beside them.",
)


def write_report(evidence: Evidence, figures: Sequence[Path], out: Path, notes: Sequence[str]) -> str:
    config = evidence.config
    parts = [f"# The paper's tables for {escape_text(Path(config.target).name)}", _setting(evidence)]
    parts += ["## Claims", _claims(evidence), "## Table 2"]
    for half in evidence.halves:
        parts += [*_table_2(half), *_beside_the_papers(evidence, half)]
    parts += [*_scores(evidence), "## Figures 3a to 3c, and Table 1", _READING]
    parts += [f"![Figures 3a to 3c]({os.path.relpath(path, out)})" for path in figures]
    for half in evidence.halves:
        parts += _replayed(evidence, half)
    parts += ["## The pilot", *_pilot(evidence), _network(evidence)]
    parts += ["## What differs from the paper", _list([*_DIFFERENCES, *notes])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _setting(evidence: Evidence) -> str:
    config = evidence.config
    pair = f"Drafter `{escape_text(Path(config.drafter).name)}`, block size {evidence.trained or 'not known yet'}"
    amount = (
        f"answers of up to {config.max_new_tokens:,} tokens, {config.num_prompts} timed and {config.replay_prompts} "
    )
    told = f"{pair}; {amount}replayed test prompts a task (fewer where a set has fewer)."
    if config.quick:
        told += " **A quick run with a small network: it shows that everything works, and is no result.**"
    if evidence.is_estimate:
        told += " Replay rounds otherwise than decoding here, so what it tells of sizes is an estimate."
    left_out = [] if "eagle3" in methods_of(config) else ["EAGLE-3 is left out: no such drafter was given."]
    unfinished = [f"T = {half.temperature:g}" for half in evidence.halves if half.table is None]
    left_out += [f"Table 2 is not finished for {', '.join(unfinished)}."] if unfinished else []
    return " ".join([told, *left_out])


def _claims(evidence: Evidence) -> str:
    verdicts = judge(evidence)
    told = (f"**{one.claim}: {one.verdict}.** {one.found[0].upper()}{one.found[1:]}." for one in verdicts)
    return "\n\n".join(f"{text} Rule: {one.rule}." for text, one in zip(told, verdicts, strict=True))


def _table_2(half: Half) -> Iterator[str]:
    run = half.table
    if run is None:
        return
    yield f"### T = {half.temperature:g}, {escape_text(run.device)}, {run.manifest.get('dtype')}"
    yield _plain(results_table(run))
    overall = mean_or(run)
    head = ("method", "speedup", "95 %", "over best fixed", "over best fixed tree", "tau, loop-free", "mismatches")
    rows = []
    for method in run.methods:
        over = [run.value(overall, method, name) for name in ("over_best_fixed", "over_best_fixed_tree")]
        told = ["-" if one is None else f"{one['ratio']:.2f} ({format_interval(one['ci'])})" for one in over]
        speedup, free = (run.value(overall, method, name) for name in ("speedup", "tau_loop_free"))
        interval = format_interval(run.value(overall, method, "speedup_ci"))
        numbers = ["-" if one is None else f"{one:.2f}" for one in (speedup, free)]
        wrong = str(run.value(overall, method, "mismatches"))
        rows.append((method, numbers[0], interval, *told, numbers[1], wrong))
    yield markdown_table(f"Intervals, {task_title(overall)}", head, rows)


def _beside_the_papers(evidence: Evidence, half: Half) -> Iterator[str]:
    """Means of all tasks, ours and the paper's."""
    run, fixed = half.table, f"dflash:{evidence.trained or 16}"
    papers = {model: pairs for model, temperature, pairs in PUBLISHED if temperature == half.temperature}
    rows = []
    for place, method in enumerate(("eagle3", fixed, PAPER)):
        ours = None if run is None else [run.value(mean_or(run), method, name) for name in ("speedup", "tau_mean")]
        rows.append((method, _pair(ours), *(_pair(pairs[place]) for pairs in papers.values())))
    if papers:
        head = ("speedup / tau", "here", *(f"paper: {model}" for model in papers))
        yield markdown_table(f"Beside the paper's, T = {half.temperature:g}", head, rows)
        yield f"The paper's: means over its tasks, {_SOURCE}, Table 2, on an H100 with up to 2,048 new tokens."


def _pair(values: Sequence[Any] | None) -> str:
    return "-" if values is None or None in values else " / ".join(f"{value:.2f}" for value in values)


def _scores(evidence: Evidence) -> Iterator[str]:
    tables = [(f"T = {half.temperature:g}, prompts of Table 2", half.table) for half in evidence.halves]
    for title, run in [("T = 0, plain decoding of more prompts", evidence.scores), *tables]:
        found = None if run is None else scores_table(run)
        if found is not None:
            yield f"### Task scores, {title}\n\n{_plain(found)}"


def _plain(table: Table) -> str:
    lines = [table.flat_headings, ["---"] * len(table.headings)]
    lines += [[f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _replayed(evidence: Evidence, half: Half) -> Iterator[str]:
    if half.sweep is None or not len(half.sweep):
        return
    sizes, temperature = swept_sizes(half), f"T = {half.temperature:g}"
    curves, fixed, best = [], [], best_sizes(half)
    held = [size for size in FIXED_SIZES if size in half.sweep.sizes]
    for task, places in half.sweep.by_task():
        part = half.sweep.rows(places)
        tau, own = part.columns(sizes), best[places]
        curves.append((task_title(task), str(len(part)), *(f"{value:.2f}" for value in tau.mean(axis=0))))
        at_fixed = [f"{part.columns([size]).mean():.2f}" for size in held]
        window = [f"{part.columns(evidence.window).max(axis=1).mean():.2f}"] if evidence.window else []
        is_window_best = f"{(own == evidence.trained).mean():.0%}"
        fixed.append((task_title(task), *at_fixed, *window, f"{tau.max(axis=1).mean():.2f}", is_window_best))
    yield markdown_table(f"3a, {temperature}: mean tau by block size", ("task", "requests", *map(str, sizes)), curves)
    counts = [f"{np.mean(best == size):.0%}" for size in sizes]
    yield markdown_table(f"3b, {temperature}: how often a size is the best", [*map(str, sizes)], [counts])
    reaches = [near_shares(evidence, half, reach) for reach in range(5)]
    shares = [f"{float(one[1].mean()):.0%}" for one in reaches if one]
    yield markdown_table(f"3c, {temperature}: best sizes within k of the trained one", [*map(str, range(5))], [shares])
    oracles = [f"oracle {evidence.window[0]}..{evidence.window[-1]}"] if evidence.window else []
    head = ("task", *map(str, held), *oracles, f"oracle {sizes[0]}..{sizes[-1]}", f"{evidence.trained} is best")
    yield markdown_table(f"Table 1, {temperature}", head, fixed)


def _pilot(evidence: Evidence) -> Iterator[str]:
    head = ("choice", "tau", "over the trained size", "over best fixed", "names the best")
    for half in evidence.halves:
        rows = []
        for name, row in half.judged().items():
            gains = show(row["gain_over_trained"]), show(row["gain_over_best_fixed"])
            rows.append((name, show(row["tau"], ".3f"), *gains, f"{row['accuracy']:.0%}"))
        yield markdown_table(f"One size per request, T = {half.temperature:g}, by replay", head, rows)
        if rows:
            yield f"Per task: `networks/{name_of(half.temperature)}/tables.md`."


def _network(evidence: Evidence) -> str:
    head = ("inputs", "device", "dtype", "parameters", "GB", "peak GB", "ms of a decision")
    rows = []
    for row in evidence.network:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}"
        size = f"{row['num_parameters']:,}", f"{row['parameter_bytes'] / 1e9:.2f}"
        rows.append((row["inputs"], escape_text(row["device"]), row["dtype"], *size, peak, f"{row['decision_ms']:.3f}"))
    return markdown_table("The network's time and memory (paper: 7.34 ms, 0.62 GB)", head, rows)


def list_runs(evidence: Evidence) -> list[Run]:
    return [half.table for half in evidence.halves if half.table is not None]
