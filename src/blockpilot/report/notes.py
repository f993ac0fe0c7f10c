"""What a reader should know before believing the numbers: said in sentences, the unpleasant ones included."""

from collections.abc import Mapping
from typing import Any

from blockpilot.report.run_data import MEAN, Run, mean_or_only, task_title
from blockpilot.report.tables import format_interval

_FEW_PROMPTS = 64  # per task; with fewer a figure is no claim
_MANY_LOOPS = 0.2


def write_notes(run: Run) -> list[str]:
    return [
        *_losslessness(run),
        *_losses(run),
        *_against_best_fixed(run),
        *_loops(run),
        *_amount(run),
        *_circumstances(run.manifest),
    ]


def _losslessness(run: Run) -> list[str]:
    rows = [row for row in run.rows if row["task"] != MEAN]
    mismatches, near_ties = (sum(row[name] for row in rows) for name in ("mismatches", "near_ties"))
    gap, reference = run.manifest.get("near_tie_gap", 1e-4), run.manifest.get("reference")
    plain = f"the plain answers of run {reference['folder']}" if reference else "plain decoding"
    notes = []
    if mismatches:
        places = [_place(place) for place in run.differences if not place["is_near_tie"]]
        found = f"{_count(mismatches, 'mismatch', 'mismatches')} with {plain}"
        notes.append(f"NOT LOSSLESS: {found}: {'; '.join(places[:8]) or 'see the rows'}.")
    else:
        num_tokens = sum(row["num_tokens"] for row in rows if reference or row["method"] != "ar")
        notes.append(f"No mismatch with {plain} in {num_tokens:,} tokens{'' if reference else ' of drafted methods'}.")
    if near_ties:
        gaps = [place["gap"] for place in run.differences if place["is_near_tie"] and place["gap"] is not None]
        largest = f" (largest gap {max(gaps):.2g})" if gaps else ""
        how = "are all but equal" if gap is None else f"lie within {gap:g} of each other"
        found = _count(near_ties, "near-tie", "near-ties")
        notes.append(f"{found}: the scores of two tokens {how}, so rounding decides{largest}.")
    if gap is None:
        notes.append("Logits are the same bits in every pass of this engine, so every difference counts as a mismatch.")
    elif gap > 1e-4:
        notes.append(f"In {run.manifest.get('dtype')} a gap of up to {gap:g} counts as a near-tie, not as a mismatch.")
    return notes


def _place(place: Mapping[str, Any]) -> str:
    gap = "" if place["gap"] is None else f", gap {place['gap']:.2g}"
    where = f"{place['prompt_id']}, token {place['position']}{gap}"
    return f"{task_title(place['task'])} {', '.join(place['answers'])} ({where})"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _losses(run: Run) -> list[str]:
    """Where a method is slower than plain decoding: for certain, or as far as was seen."""
    notes, uncertain = [], []
    for method in run.methods:
        rows = [row for row in run.of_method(method) if method != "ar" and (row["speedup"] or 1) < 1]
        certain = [row for row in rows if row["speedup_ci"] is not None and row["speedup_ci"][1] < 1]
        if certain:
            notes.append(f"{method} loses against plain decoding on {_list_tasks(certain, len(run.tasks))}.")
        if other := [row for row in rows if row not in certain]:
            uncertain.append(f"{method} on {_list_tasks(other, len(run.tasks))}")
    if uncertain:
        notes.append(f"Slower than plain decoding, but not for certain: {'; '.join(uncertain)}.")
    return notes


def _list_tasks(rows: list[dict[str, Any]], num_tasks: int) -> str:
    if len(rows) == num_tasks > 2:
        speeds = sorted(row["speedup"] for row in rows)
        return f"all tasks ({speeds[0]:.2f}x to {speeds[-1]:.2f}x)"
    return ", ".join(f"{task_title(row['task'])} ({row['speedup']:.2f}x)" for row in rows)


def _against_best_fixed(run: Run) -> list[str]:
    """The only comparison that counts for a pilot that adapts."""
    column, notes = mean_or_only(run), []
    for method in run.methods:
        for reference in ("best-fixed", "best-fixed-tree"):
            found = run.value(column, method, f"over_{reference.replace('-', '_')}")
            if method not in ("blockpilot", "chain-step", "step", "auto") or found is None:
                continue
            interval = found["ci"]
            verdict = "" if interval is None or not interval[0] <= 1 <= interval[1] else ": no difference shown"
            notes.append(f"{method} runs at {found['ratio']:.2f} times {reference} ({_range(interval)}){verdict}.")
    if not notes and run.fixed_sizes and "best-fixed" not in run.methods:
        notes += _in_hindsight(run, column)
    return notes


def _in_hindsight(run: Run, column: str) -> list[str]:
    """Nobody knew the best size before, so it is a bar that no fixed size chosen beforehand would reach for certain."""
    speeds = run.known(column, "speedup")
    known = [method for method in run.fixed_sizes.values() if method in speeds]
    if not known:
        return []
    best = max(known, key=speeds.__getitem__)
    note = f"best-fixed was not measured; the best of the measured sizes in hindsight is {best} ({speeds[best]:.2f}x)"
    if "auto" in speeds:
        note += f", auto is at {speeds['auto']:.2f}x"
    if (found := run.value(column, "auto", "over_best_chain")) is not None:
        note += f", {found['ratio']:.2f} times {found['method']} ({_range(found['ci'])})"
    return [f"{note}."]


def _range(interval: list[float] | None) -> str:
    return "no interval" if interval is None else format_interval(interval)


def _loops(run: Run) -> list[str]:
    found = [row for row in run.of_method("ar") if (row["loop_share"] or 0) > _MANY_LOOPS]
    if not found:
        return []
    shares = ", ".join(f"{task_title(row['task'])} {row['loop_share']:.0%}" for row in found)
    return [f"The model repeats itself ({shares} of the tokens), which flatters every drafter: judge by τ loop-free."]


def _amount(run: Run) -> list[str]:
    fewest = min((row["num_prompts"] for row in run.of_method("ar")), default=_FEW_PROMPTS)
    if fewest < 2:
        return ["One prompt per task has no interval: this run shows that everything works, not how fast it is."]
    claim = f"with fewer than {_FEW_PROMPTS} a figure of one task is no claim"
    return [f"{fewest} prompts in the smallest task: {claim}."] if fewest < _FEW_PROMPTS else []


def _circumstances(manifest: dict[str, Any]) -> list[str]:
    notes = [
        f"Task {task_title(task)} has no results: {reason}."
        for task, reason in manifest.get("left_out_tasks", {}).items()
    ]
    for task, count in manifest.get("prompts_too_long", {}).items():
        passed = f"{_count(count, 'prompt was', 'prompts were')} passed over"
        notes.append(f"{task_title(task)}: {passed}: too long for the context.")
    if manifest.get("prompts", {}).get("swebench", {}).get("file") == "swebench.jsonl.gz":
        notes.append("The shipped SWE-bench prompts are the shortest issues of the set.")
    split = manifest.get("arguments", {}).get("split", "test")
    if split != "test":
        notes.append(f"Measured on the split {split!r}, not on test prompts alone.")
    if len(manifest.get("sessions", [])) > 1:
        notes.append(f"Measured in {len(manifest['sessions'])} sessions; each round of prompts lies within one.")
    return notes
