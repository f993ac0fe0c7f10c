"""What the stages have found, read from their folders. What is not there yet is None, or missing from a mapping."""

import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pilot_study.intervals import Bootstrap, Estimate
from pilot_study.trace_tables import SizeTable

from blockpilot.bench.methods import PAPER
from blockpilot.core.manifests import MANIFEST
from blockpilot.core.reading import read_json
from blockpilot.report.run_data import MEAN, Run, read_run
from paper_study.plan import StudyConfig, name_of

RowsByName = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Half:
    """What was found at one temperature."""

    temperature: float
    table: Run | None  # Table 2
    sweep: SizeTable | None  # tau of test prompts at every size
    networks: Sequence[Mapping[str, Any]]  # rows of `pilot_experiments.py`

    def judged(self, group: str | None = None) -> RowsByName:
        """Networks and baselines over all test prompts, by name."""
        rows = [row for row in self.networks if row["experiment"] == "prefill"]
        overall = rows[0]["task"] if rows else ""
        return {row["name"]: row for row in rows if row["task"] == overall and group in (None, row["group"])}

    def split(self) -> Mapping[str, Any] | None:
        """The size chosen on one half of an answer, judged on the other, over all test prompts."""
        rows = [row for row in self.networks if row["experiment"] == "split" and row["split"] == "halves"]
        return rows[-1] if rows else None

    def compare(self, method: str, other: str, name: str) -> Estimate | None:
        """By how much a method's mean of a per-prompt figure (`tau` or `tokens_per_second`) is above another's."""
        if self.table is None or not {method, other} <= {*self.table.methods}:
            return None
        pairs = [pair for task in self.table.tasks for pair in _pair_prompts(self.table, task, (method, other), name)]
        if len(pairs) < 2:
            return None
        tasks, ours, base = zip(*pairs, strict=True)
        return Bootstrap(tasks).gain(np.array(ours), np.array(base))


@dataclass(frozen=True)
class Evidence:
    config: StudyConfig
    trained: int | None  # the drafter's block size
    is_estimate: bool  # replay rounds otherwise than decoding
    halves: Sequence[Half]
    scores: Run | None
    network: Sequence[Mapping[str, Any]]

    @property
    def window(self) -> tuple[int, ...]:
        """The sizes that the pilot chooses among."""
        rows = [row for half in self.halves for row in half.judged("main").values()]
        return tuple(rows[0]["sizes"]) if rows else ()


def read_evidence(config: StudyConfig, out: Path) -> Evidence:
    halves, facts = [], None
    for temperature in config.temperatures:
        folder = out / "networks" / name_of(temperature)
        facts = read_json(folder / MANIFEST) or facts
        taus, rows = read_json(folder / "taus.json"), _read_lines(folder / "rows.jsonl")
        table = _read_table(out / "tables" / name_of(temperature))
        halves.append(Half(temperature, table, SizeTable.of_taus(taus) if taus else None, rows))
    trained = facts and facts["trained_block_size"]
    is_estimate = bool(facts) and any(traces["is_estimate"] for traces in facts["traces"])
    scores, network = _read_table(out / "scores"), _read_lines(out / "network.jsonl")
    return Evidence(config, trained, is_estimate, halves, scores, network)


def _is_complete(folder: Path) -> bool:
    path = folder / MANIFEST
    return os.path.isfile(path) and bool(read_json(path).get("is_complete"))


def _read_table(folder: Path) -> Run | None:
    return read_run(folder) if _is_complete(folder) else None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not os.path.isfile(path):
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _pair_prompts(run: Run, task: str, methods: tuple[str, str], name: str) -> list[tuple[str, float, float]]:
    """Task and both methods' values of the prompts that both have one for."""
    found = []
    for method in methods:
        rows = run.value(task, method, "per_prompt") or []
        found.append({row["id"]: row[name] for row in rows if row[name] is not None})
    return [(task, found[0][id_], found[1][id_]) for id_ in found[0] if id_ in found[1]]


def mean_or(run: Run) -> str:
    """The column over all tasks."""
    return MEAN if MEAN in run.columns else run.columns[0]


def decode_ms(run: Run) -> float | None:
    """Mean milliseconds of decoding a prompt's answers with the paper's pilot."""
    rows = [row for row in run.of_method(PAPER) if row["tokens_per_second"]]
    num_prompts = sum(row["num_prompts"] for row in rows)
    if not num_prompts:
        return None
    return float(1e3 * sum(row["num_tokens"] / row["tokens_per_second"] for row in rows) / num_prompts)
