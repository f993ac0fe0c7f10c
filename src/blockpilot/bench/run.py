"""A benchmark run from prompts to rows.

choose      best-fixed, best-fixed-tree: all candidates on calibration prompts (`calibration.jsonl`)
warm up     every method once, not counted
measure     round by round, all methods on the same prompts in a shuffled order (`answers.jsonl`)
conclude    audit against plain decoding, scores (`rows.jsonl`, `differences.jsonl`, `samples.jsonl`, `manifest.json`)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockpilot.bench import manifest as manifests
from blockpilot.bench.answers import Answer, select
from blockpilot.bench.audit import Place, group_differences
from blockpilot.bench.config import BEST_FIXED
from blockpilot.bench.measuring import Measurer
from blockpilot.bench.methods import ADAPTIVE, Method, candidates
from blockpilot.bench.plan import plan_rounds
from blockpilot.bench.rows import Row, build_rows
from blockpilot.bench.scoring import score
from blockpilot.bench.site import BenchSetup, LocalSite, Site
from blockpilot.bench.statistics import add_up
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.core.progress import Progress, Report


@dataclass(frozen=True)
class BenchResult:
    rows: list[Row]
    manifest: dict[str, Any]


def run_bench(setup: BenchSetup, out: Path, report: Report) -> BenchResult:
    """Measure everything that `out` does not hold yet, and write the results."""
    return BenchRun(setup, LocalSite(setup), out, report).run()


class BenchRun:
    """Leads a run: what needs models is asked of the site."""

    def __init__(self, setup: BenchSetup, site: Site, out: Path, report: Report) -> None:
        self.setup, self.site, self.out, self.config = setup, site, out, setup.config
        self.fit, tasks, many = site.fit, site.fit.tasks, setup.config.concurrency
        self.manifest = manifests.open_run(out, site.description)
        self.choosing = plan_rounds({task.name: task.calibration for task in tasks}, many)  # none without need
        self.rounds = plan_rounds({task.name: task.prompts for task in tasks}, many, setup.config.repeats)
        total = sum(work.num_answers for work in self.choosing) * self.config.num_candidates
        total += sum(work.num_answers for work in self.rounds) * len(setup.methods)
        self.measurer = Measurer(site.answer_rounds, Progress(report, total))

    def run(self) -> BenchResult:
        if any(method.pilot in ADAPTIVE for method in self.setup.methods):  # they weigh steps by these
            self.measurer.progress.prepare("measuring step costs")
            self.manifest["sessions"][-1]["step_costs"] = self.site.step_costs()
            manifests.write(self.out, self.manifest)
        answers = self.measurer.measure(self.rounds, self.choose_methods(), self.out / "answers.jsonl")
        return self._conclude(answers)

    def choose_methods(self) -> tuple[Method, ...]:
        """The methods, with those to be chosen as what was fastest on calibration prompts of all tasks together."""
        if not self.config.chosen:
            return self.setup.methods
        if not self.choosing:
            name = self.config.chosen[0]
            raise InputError(f"{name} is chosen on calibration prompts, and these files hold none that fits")
        everyone = [method for name in self.config.chosen for method in candidates(name)]
        answers = self.measurer.measure(self.choosing, everyone, self.out / "calibration.jsonl")
        if not answers:
            raise BlockPilotError(f"{self.config.chosen[0]} could not be chosen: no calibration prompt was answered")
        chosen = {name: self._choose(name, answers) for name in self.config.chosen}
        manifests.write(self.out, self.manifest)
        return tuple(chosen.get(method.name, method) for method in self.setup.methods)

    def _choose(self, name: str, answers: Sequence[Answer]) -> Method:
        methods = {method.name: method for method in candidates(name)}
        rates = _rates(answers, methods)
        best = max(rates, key=rates.__getitem__)
        by_task = {task: _rates(select(answers, task=task), methods) for task in sorted({one.task for one in answers})}
        best_of = {task: max(found, key=found.__getitem__) for task, found in by_task.items()}
        said: dict[str, Any] = {"method": best, "method_by_task": best_of, "tokens_per_second": rates}
        if name == BEST_FIXED:  # a size says it all
            sizes = {task: _size(found) for task, found in best_of.items()}
            rates_by_size = {str(_size(method)): rate for method, rate in rates.items()}
            said = {"size": _size(best), "size_by_task": sizes, "tokens_per_second": rates_by_size}
        count = len({(answer.task, answer.prompt_id) for answer in answers})
        self.manifest[name.replace("-", "_")] = said | {"num_calibration_prompts": count}
        return replace(methods[best], name=name)

    def _conclude(self, answers: Sequence[Answer]) -> BenchResult:
        left_out = self.measurer.left_out
        tasks = [task for task in self.fit.tasks if task.name not in left_out]
        if not tasks:
            raise BlockPilotError(f"no task could be measured: {'; '.join(left_out.values())}")
        places = {
            (task.name, prompt.id): Place(prompt, self.config.seed + place)
            for task in tasks
            for place, prompt in enumerate(task.prompts)
        }
        differences = self.site.find_differences(answers, places)
        scores = score(answers, places, is_code_scored=self.setup.is_code_scored)
        names = [task.name for task in tasks]
        rows = build_rows(answers, differences, scores, tasks=names, manifest=self.manifest)
        self.manifest |= {"is_complete": True, "left_out_tasks": left_out, "prompts_too_long": self.fit.num_left_out}
        _write_lines(self.out / "rows.jsonl", rows)
        _write_lines(self.out / "differences.jsonl", group_differences(differences))
        _write_lines(self.out / "samples.jsonl", self.site.pick_samples(answers, tasks))
        manifests.write(self.out, self.manifest)
        return BenchResult(rows, self.manifest)


def _rates(answers: Sequence[Answer], methods: Iterable[str]) -> dict[str, float]:
    """Tokens per second of every method."""
    return {name: add_up(select(answers, method=name)).tokens_per_second or 0.0 for name in methods}


def _size(method: str) -> int:
    return int(method.partition(":")[2])


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))
