"""The files of one benchmark run, read and checked. A report knows nothing else: no engine, no model, no tokenizer."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.files import parse_json

Row = dict[str, Any]
MEAN = "mean"
_TITLES = {"gsm8k": "GSM8K", "math500": "MATH-500", "aime24": "AIME24", "humaneval": "HumanEval", "mbpp": "MBPP"}
_TITLES |= {"swebench": "SWE-bench", "mt_bench": "MT-Bench", "alpaca": "Alpaca", MEAN: "Mean"}
_NEEDED: tuple[str, ...] = ("task", "method", "model", "temperature", "num_prompts", "num_tokens", "num_steps")
_NEEDED += ("tau_mean", "tau_pooled", "tau_loop_free", "loop_share", "tokens_per_second", "speedup", "speedup_ci")
_NEEDED += ("end_to_end_speedup", "mismatches", "near_ties", "manifest")


@dataclass(frozen=True)
class Run:
    name: str  # of its folder
    manifest: dict[str, Any]
    rows: list[Row]  # of tasks and, where there are several, of their mean
    samples: list[dict[str, Any]]
    differences: list[dict[str, Any]]  # places where texts part from the plain ones, and which do

    @property
    def manifest_text(self) -> str:
        """The manifest for readers, without step costs, which are drawn."""
        sessions = self.manifest.get("sessions", [])
        shown = [{key: value for key, value in one.items() if key != "step_costs"} for one in sessions]
        return json.dumps({**self.manifest, "sessions": shown}, indent=1)

    @property
    def columns(self) -> list[str]:
        """The tasks, and their mean where there is one."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    @property
    def tasks(self) -> list[str]:
        return [task for task in self.columns if task != MEAN]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def value(self, task: str, method: str, name: str) -> Any:
        """None where there is no such row, or the row has no such value."""
        return self.known(task, name).get(method)

    def known(self, task: str, name: str) -> dict[str, Any]:
        """By method, where the value is known."""
        return {row["method"]: row[name] for row in self.rows if row["task"] == task and row.get(name) is not None}

    def of_method(self, method: str) -> list[Row]:
        """Its rows of single tasks."""
        return [row for row in self.rows if row["method"] == method and row["task"] != MEAN]

    @property
    def fixed_sizes(self) -> dict[int, str]:
        """Block sizes measured as fixed DFlash chains, and the methods that are."""
        found = {int(m.partition(":")[2]): m for m in self.methods if m.startswith("dflash:")}
        return dict(sorted(found.items()))

    @property
    def device(self) -> str:
        return str(self.manifest.get("device", "unknown device"))

    @property
    def title(self) -> str:
        row = self.rows[0]
        settings = self.manifest.get("arguments", {})
        many, budget = settings.get("concurrency", 1), settings.get("token_budget")
        title = f"{row['model']}, T = {row['temperature']:g}" + (f", {many} requests at once" if many > 1 else "")
        return title + (f", {budget} prompt tokens per pass" if budget else "")


def task_title(task: str) -> str:
    return _TITLES.get(task, task)


def mean_or_only(run: Run) -> str:
    """The column that stands for the whole run."""
    return MEAN if MEAN in run.columns else run.columns[0]


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give the --out of a `blockpilot bench` run")
    path = _find(folder, "rows.jsonl")
    rows = _read_lines(path)
    if not rows:
        raise InputError(f"{path} holds no rows: the run may not be finished")
    for number, row in enumerate(rows, start=1):
        if missing := [name for name in _NEEDED if name not in row]:
            raise InputError(f"{path}, line {number}: no field {missing[0]!r}")
    manifest = _parse(_read(folder / "manifest.json"), f"{folder / 'manifest.json'}")
    others = (_find(folder, "samples.jsonl"), _find(folder, "differences.jsonl"))
    samples, differences = (_read_lines(other) if other.is_file() else [] for other in others)
    return Run(folder.resolve().name, manifest, rows, samples, differences)


def _find(folder: Path, name: str) -> Path:
    """The file, or its gzipped form (`rows.jsonl.gz`)."""
    packed = folder / f"{name}.gz"
    return packed if packed.is_file() and not (folder / name).is_file() else folder / name


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {reason}; the run may not be finished") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = _read(path).splitlines()
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse(text: str, where: str) -> dict[str, Any]:
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object")
    return value
