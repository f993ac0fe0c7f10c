"""A benchmark run from prompts to rows.

    choose      best-fixed: every size on calibration prompts (`calibration.jsonl`)
    warm up     every method once, not counted
    measure     round by round, all methods on the same prompts in a shuffled order (`answers.jsonl`)
    conclude    audit against plain decoding, scores, rows (`rows.jsonl`, `samples.jsonl`, `manifest.json`)
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockpilot.bench import manifest as manifests
from blockpilot.bench.answers import AnswersFile, select
from blockpilot.bench.asking import Asker, Round
from blockpilot.bench.audit import Place, find_differences
from blockpilot.bench.config import BEST_FIXED_SIZES, BenchConfig
from blockpilot.bench.engines import DrafterSpec, Engines
from blockpilot.bench.methods import BEST_FIXED, Method, fixed_method
from blockpilot.bench.plan import Fit, fit_prompts, plan_calibration, plan_rounds
from blockpilot.bench.rows import Row, RowFacts, build_rows
from blockpilot.bench.samples import pick_samples
from blockpilot.bench.scoring import Scorer
from blockpilot.bench.statistics import add_up
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.config import EngineConfig
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.models.loading import LoadedTarget

Report = Callable[[str, int, int], None]  # (what, done, total)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    config: BenchConfig
    methods: tuple[Method, ...]
    tasks: tuple[TaskPrompts, ...]
    target: LoadedTarget
    drafters: Mapping[str, DrafterSpec]
    device: str = "cpu"
    dtype: str = "float32"
    linear_backend: str = "auto"
    costs: Path | None = None
    is_code_scored: bool = False


@dataclass
class BenchResult:
    rows: list[Row]
    manifest: dict[str, Any]


@dataclass
class _Progress:
    report: Report
    total: int
    done: int = 0

    def advance(self, what: str, count: int) -> None:
        self.done += count
        self.report(what, self.done, self.total)


@dataclass
class BenchRun:
    setup: BenchSetup
    out: Path
    report: Report
    skipped: dict[str, str] = field(default_factory=dict)  # task -> why it has no results

    def run(self) -> BenchResult:
        setup = self.setup
        limit = setup.target.decoder.config.context_length
        self.fit = fit = fit_prompts(setup.tasks, setup.target.tokenizer, setup.config, limit)
        self.engines = engines = Engines.build(setup.target, setup.drafters, self._engine_config(fit), setup.costs)
        description = manifests.describe_run(setup.config, setup.methods, fit.tasks, engines, setup.drafters)
        self.manifest = manifests.open_run(self.out, description)
        self.asker = Asker(engines, setup.config)
        choosing = plan_calibration(fit.tasks, setup.config) if BEST_FIXED in setup.config.methods else []
        rounds = plan_rounds(fit.tasks, setup.config)
        total = sum(work.num_answers for work in choosing) * len(BEST_FIXED_SIZES)
        total += sum(work.num_answers for work in rounds) * len(setup.methods)
        progress = _Progress(self.report, total)
        methods = self._choose_best_fixed(choosing, progress)
        answers = self._measure(rounds, methods, self.out / "answers.jsonl", progress)
        return self._conclude(answers, methods)

    def _engine_config(self, fit: Fit) -> EngineConfig:
        concurrency = self.setup.config.concurrency
        return EngineConfig(
            device=self.setup.device,
            dtype=self.setup.dtype,
            num_slots=concurrency,
            token_budget=fit.token_budget(concurrency),
            context_length=fit.context_length,
            linear_backend=self.setup.linear_backend,
        )

    def _choose_best_fixed(self, rounds: Sequence[Round], progress: _Progress) -> tuple[Method, ...]:
        """The methods, with best-fixed at the size that was fastest on calibration prompts of all tasks together."""
        methods = self.setup.methods
        if BEST_FIXED not in self.setup.config.methods:
            return methods
        if not rounds:
            raise InputError("best-fixed is chosen on calibration prompts, and these files hold none that fits")
        sizes = [fixed_method(size) for size in BEST_FIXED_SIZES]
        answers = self._measure(rounds, sizes, self.out / "calibration.jsonl", progress).answers
        if not answers:
            raise BlockPilotError("best-fixed could not be chosen: no calibration prompt was answered")
        tasks = {answer.task for answer in answers}
        choice = {
            "size": _fastest(answers),
            "size_by_task": {task: _fastest(select(answers, task=task)) for task in sorted(tasks)},
            "tokens_per_second": {
                str(size): add_up(select(answers, method=f"dflash:{size}")).tokens_per_second
                for size in BEST_FIXED_SIZES
            },
            "num_calibration_prompts": len({(answer.task, answer.prompt_id) for answer in answers}),
        }
        self.manifest["best_fixed"] = choice
        manifests.write(self.out, self.manifest)
        return tuple(m.at_size(choice["size"]) if m.name == BEST_FIXED else m for m in methods)

    def _measure(
        self, rounds: Sequence[Round], methods: Sequence[Method], path: Path, progress: _Progress
    ) -> AnswersFile:
        """Answer what the file does not hold yet. A task that does not fit into memory is left out."""
        file = AnswersFile(path)
        file.drop_incomplete({work.key: work.num_answers * len(methods) for work in rounds})
        done = file.rounds
        if any(work.key not in done for work in rounds):
            self._warm_up(methods, rounds[0], progress)
        for work in rounds:
            if work.key in done or work.task in self.skipped:
                progress.advance(work.task, work.num_answers * len(methods))
                continue
            try:
                self._measure_round(work, methods, file, progress)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                self._skip(work.task, error)
        for task in self.skipped:
            file.drop_task(task)
        return file

    def _warm_up(self, methods: Sequence[Method], work: Round, progress: _Progress) -> None:
        for method in methods:
            progress.advance(f"warming up {method.name}", 0)
            try:
                self.asker.warm_up(method, work.prompts)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise  # where memory is short, the rounds will tell which task does not fit

    def _measure_round(self, work: Round, methods: Sequence[Method], file: AnswersFile, progress: _Progress) -> None:
        for method in work.shuffle(methods, self.setup.config.seed):
            answers = self.asker.ask(work, method)
            file.append(answers)
            progress.advance(f"{work.task}, {method.name}", len(answers))

    def _skip(self, task: str, error: BaseException) -> None:
        reason = f"out of memory: {' '.join(str(error).split())[:200]}"
        logger.warning("task %s is left out: %s", task, reason)
        self.skipped[task] = reason
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _conclude(self, file: AnswersFile, methods: Sequence[Method]) -> BenchResult:
        setup, answers = self.setup, file.answers
        tasks = [task for task in self.fit.tasks if task.name not in self.skipped]
        if not tasks:
            raise BlockPilotError(f"no task could be measured: {'; '.join(self.skipped.values())}")
        places = {
            (task.name, prompt.id): Place(prompt, setup.config.seed + place)
            for task in tasks
            for place, prompt in enumerate(task.prompts)
        }
        differences = find_differences(answers, places, self.engines.plain, setup.config)
        scorer = Scorer(places, is_code_scored=setup.is_code_scored)
        facts = RowFacts(
            model=self.manifest["target"],
            temperature=setup.config.temperature,
            manifest=self.manifest["id"],
            tasks=tuple(task.name for task in tasks),
            methods=setup.config.methods,
        )
        rows = build_rows(answers, differences, scorer.score(answers), facts)
        self.manifest |= {
            "is_complete": True,
            "methods": {method.name: manifests.method_facts(method) for method in methods},
            "differences": [asdict(difference) for difference in differences],
            "skipped_tasks": self.skipped,
            "prompts_too_long": self.fit.num_left_out,
        }
        _write_lines(self.out / "rows.jsonl", rows)
        _write_lines(self.out / "samples.jsonl", pick_samples(answers, tasks, setup.target.tokenizer))
        manifests.write(self.out, self.manifest)
        return BenchResult(rows, self.manifest)


def run_bench(setup: BenchSetup, out: Path, report: Report) -> BenchResult:
    """Measure everything that `out` does not hold yet, and write the results."""
    return BenchRun(setup, out, report).run()


def _fastest(answers: Sequence[Any]) -> int:
    rates = {size: add_up(select(answers, method=f"dflash:{size}")).tokens_per_second for size in BEST_FIXED_SIZES}
    return max(BEST_FIXED_SIZES, key=lambda size: rates[size] or 0.0)


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return not isinstance(error, RuntimeError) or "out of memory" in text or "allocate memory" in text


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))
