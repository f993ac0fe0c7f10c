"""The files of one benchmark run, read and checked. A report knows nothing else: no engine, no model, no tokenizer."""

import json
import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.compressed import read_lines
from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE
from blockpilot.core.manifests import MANIFEST, MAX_BYTES, RESULTS, require_content
from blockpilot.core.reading import convert, decode_json, read_json
from blockpilot.report import schema

Row = dict[str, Any]
MEAN = "mean"
_TITLES = {"gsm8k": "GSM8K", "math500": "MATH-500", "aime24": "AIME24", "humaneval": "HumanEval", "mbpp": "MBPP"}
_TITLES |= {"swebench": "SWE-bench", "mt_bench": "MT-Bench", "alpaca": "Alpaca", MEAN: "Mean"}
_MAX_LINES_BYTES = 512 * MEGABYTE  # of a file of lines, once it is unpacked
_MAX_LINES = 20_000
_MAX_NAMES = 64  # methods, and tasks
_MAX_NESTING = 20
_CHAIN = re.compile(r"dflash:[1-9][0-9]?")
_UNFINISHED = "the run may not be finished"
_DAMAGED = "the file is damaged: mend it, or run `blockpilot bench` anew"


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
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is no folder: give the --out of a `blockpilot bench` run")
    require_content(folder, RESULTS)
    path = _find(folder, "rows.jsonl")
    rows = _read_lines(_require(path), schema.RowValues)
    if not rows:
        raise InputError(f"{path} holds no rows: {_UNFINISHED}")
    _check_names(path, rows)
    manifest = _read_manifest(_require(folder / MANIFEST))
    kinds = {"samples.jsonl": schema.SampleValues, "differences.jsonl": schema.DifferenceValues}
    others = [(_find(folder, name), kind) for name, kind in kinds.items()]
    samples, differences = (_read_lines(other, kind) if os.path.isfile(other) else [] for other, kind in others)
    _check_steps(others[0][0], samples)
    return Run(folder.resolve().name, manifest, rows, samples, differences)


def _find(folder: Path, name: str) -> Path:
    """The file, or its gzipped form (`rows.jsonl.gz`)."""
    packed = folder / f"{name}.gz"
    return packed if os.path.isfile(packed) and not os.path.isfile(folder / name) else folder / name


def _require(path: Path) -> Path:
    if not os.path.isfile(path):
        reason = "it is no file" if os.path.exists(path) else "No such file or directory"
        raise InputError(f"{path} cannot be read: {reason}; {_UNFINISHED}")
    return path


def _read_lines(path: Path, kind: Any) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = []
    for line in read_lines(path, most=_MAX_LINES_BYTES):
        if len(values) == _MAX_LINES:
            raise InputError(f"{path} has more than {_MAX_LINES:,} lines: no run writes so many")
        values.append(decode_json(line, kind, f"{path}, line {len(values) + 1}", _DAMAGED))
    return values


def _read_manifest(path: Path) -> dict[str, Any]:
    """As it stands: it is shown whole. What the report speaks of is checked."""
    manifest: dict[str, Any] = read_json(path, advice=_DAMAGED, most=MAX_BYTES)
    level: list[Any] = [manifest]
    for _ in range(_MAX_NESTING):
        level = [inner for value in level if isinstance(value, list | dict) for inner in _inner(value)]
    if level:
        raise InputError(f"{path}: nested too deeply; {_DAMAGED}")
    convert(manifest, schema.ManifestValues, str(path), _DAMAGED)
    return manifest


def _inner(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _check_names(path: Path, rows: list[Row]) -> None:
    """No more tasks and methods than a page can show, and `dflash:B` names a block size."""
    for number, row in enumerate(rows, start=1):
        if (method := row["method"]).startswith("dflash:") and not _CHAIN.fullmatch(method):
            raise InputError(f"{path}, line {number}: method {method!r} names no block size; {_DAMAGED}")
    for what in ("task", "method"):
        if len({row[what] for row in rows}) > _MAX_NAMES:
            raise InputError(f"{path}: more than {_MAX_NAMES} {what}s; a report shows no more, so leave some out")


def _check_steps(path: Path, samples: list[dict[str, Any]]) -> None:
    for number, sample in enumerate(samples, start=1):
        for method, steps in sample["steps"].items():
            if len({len(column) for column in steps.values()}) > 1:
                where = f"{path}, line {number}: the columns of {method!r}"
                raise InputError(f"{where} have different lengths, at steps; {_DAMAGED}")
