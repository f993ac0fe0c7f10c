"""Where the models of a run are: everything of it that needs them, and nothing else.

A local run has one `LocalSite`. A run on a cluster has one per worker, and the process that leads it loads no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from blockpilot.bench.answers import Answer
from blockpilot.bench.asking import Asker
from blockpilot.bench.audit import Difference, Place, find_differences
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.engines import DrafterSpec, Engines
from blockpilot.bench.manifest import describe_run
from blockpilot.bench.measuring import LocalMeasurer, Measurer, Progress
from blockpilot.bench.methods import Method
from blockpilot.bench.plan import Fit, fit_prompts
from blockpilot.bench.samples import pick_samples
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.config import EngineConfig
from blockpilot.models.loading import LoadedTarget, load_target


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """What is measured and how; with models named and not loaded it can be sent to another process."""

    config: BenchConfig
    methods: tuple[Method, ...]
    tasks: tuple[TaskPrompts, ...]
    target: LoadedTarget | str
    drafters: Mapping[str, DrafterSpec]  # by kind: dflash, eagle3, ngram
    device: str = "cpu"
    dtype: str = "float32"
    linear_backend: str = "auto"
    costs: Path | None = None  # step costs for the pilots of the DFlash drafter
    is_code_scored: bool = False


class Site(Protocol):
    @property
    def fit(self) -> Fit: ...

    @property
    def description(self) -> dict[str, Any]: ...

    def make_measurer(self, progress: Progress) -> Measurer: ...

    def find_differences(
        self, answers: Sequence[Answer], places: Mapping[tuple[str, str], Place]
    ) -> list[Difference]: ...

    def pick_samples(self, answers: Sequence[Answer], tasks: Sequence[TaskPrompts]) -> list[dict[str, Any]]: ...

    def step_costs(self) -> dict[str, Any]: ...


class LocalSite:
    def __init__(self, setup: BenchSetup) -> None:
        target = setup.target
        if isinstance(target, str):
            target = load_target(target, getattr(torch, setup.dtype))
        self.config, self.tokenizer = setup.config, target.tokenizer
        self.fit = fit_prompts(setup.tasks, self.tokenizer, setup.config, target.decoder.config.context_length)
        self.engines = Engines.build(target, setup.drafters, _engine_config(setup, self.fit), setup.costs)
        self.description = describe_run(setup.config, setup.methods, self.fit.tasks, self.engines, setup.drafters)
        self.asker = Asker(self.engines, setup.config)

    def make_measurer(self, progress: Progress) -> LocalMeasurer:
        return LocalMeasurer(self.asker, progress, self.config.seed)

    def find_differences(self, answers: Sequence[Answer], places: Mapping[tuple[str, str], Place]) -> list[Difference]:
        return find_differences(answers, places, self.engines.plain, self.config)

    def pick_samples(self, answers: Sequence[Answer], tasks: Sequence[TaskPrompts]) -> list[dict[str, Any]]:
        return pick_samples(answers, tasks, self.tokenizer)

    def step_costs(self) -> dict[str, Any]:
        """What the pilots of the DFlash drafter weigh."""
        return self.engines.llms["dflash"].costs.to_dict()


def _engine_config(setup: BenchSetup, fit: Fit) -> EngineConfig:
    return EngineConfig(
        device=setup.device,
        dtype=setup.dtype,
        num_slots=setup.config.concurrency,
        token_budget=fit.token_budget(setup.config.concurrency),
        context_length=fit.context_length,
        linear_backend=setup.linear_backend,
    )
