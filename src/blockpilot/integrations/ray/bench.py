"""`blockpilot bench --ray`: every worker answers whole rounds, the process that leads keeps the files and the rows.

A round is measured by one worker from its first method to its last, so that a comparison never spans two machines.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockpilot.bench.answers import Answer
from blockpilot.bench.audit import Difference, Place
from blockpilot.bench.measuring import Found
from blockpilot.bench.methods import Method
from blockpilot.bench.plan import Fit, Round
from blockpilot.bench.run import BenchResult, BenchRun
from blockpilot.bench.site import BenchSetup, LocalSite
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.progress import Progress, Report
from blockpilot.integrations.ray.cluster import ClusterOptions, Pool, open_cluster


class WorkerSite(LocalSite):
    """The models of one worker."""

    def __init__(self, setup: BenchSetup) -> None:
        super().__init__(setup)
        self.is_warm = set[Method]()

    def describe(self) -> tuple[Fit, dict[str, Any]]:
        return self.fit, self.description

    def answer_whole_round(self, work: Round, methods: Sequence[Method]) -> list[Found]:
        cold = [method for method in methods if method not in self.is_warm]
        self.warm_up(cold, [work], Progress(lambda *ignored: None, 0))
        self.is_warm.update(cold)
        return list(self.answer_round(work, methods))


class _RaySite:
    """The models are with the workers: any of them answers for all."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.fit, self.description = pool.ask("describe")

    def answer_rounds(self, rounds: Sequence[Round], methods: Sequence[Method], progress: Progress) -> Iterator[Found]:
        """All rounds are enqueued at once: those of a task that runs out of memory still run, and are dropped."""
        progress.start()
        for _, found in self.pool.run("answer_whole_round", [(work, methods) for work in rounds]):
            yield from found

    def find_differences(self, answers: Sequence[Answer], places: Mapping[tuple[str, str], Place]) -> list[Difference]:
        return self.pool.ask("find_differences", answers, places)

    def pick_samples(self, answers: Sequence[Answer], tasks: Sequence[TaskPrompts]) -> list[dict[str, Any]]:
        return self.pool.ask("pick_samples", answers, tasks)

    def step_costs(self) -> dict[str, Any]:
        return self.pool.ask("step_costs")


def bench_on_ray(setup: BenchSetup, options: ClusterOptions, *, out: Path, report: Report) -> BenchResult:
    """`run_bench` on a cluster; `setup` names its target and drafters."""
    with open_cluster(options) as placements, Pool(WorkerSite, placements, setup) as pool:
        return BenchRun(setup, _RaySite(pool), out, report).run()
