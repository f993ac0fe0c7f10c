"""Where the models of a run are: everything of it that needs them, and nothing else.

A local run has one `LocalSite`. A run on a cluster has one per worker, and the process that leads it loads no model.
A site has one target in memory and one `LLM` per drafter around it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from blockpilot.bench.answers import Answer, plain_answers
from blockpilot.bench.audit import Difference, Judge, Place, find_differences
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.manifest import describe_run
from blockpilot.bench.measuring import Asker, Found
from blockpilot.bench.methods import DRAFTER_OPTIONS, NO_DRAFTER, Method
from blockpilot.bench.plan import Fit, Round, fit_prompts
from blockpilot.bench.reference import Reference
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.config import EngineConfig
from blockpilot.core.device import torch_dtype
from blockpilot.core.errors import InputError
from blockpilot.core.progress import Progress
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.engine.assemble import build_drafter, place_target, settle_dtype
from blockpilot.engine.llm import LLM
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.loading import LoadedTarget, load_target
from blockpilot.text.detokenizer import IncrementalDetokenizer

_MAX_PROMPT_CHARACTERS = 2000  # of a sample
_DrafterSpec = str | Drafter | DFlash | Eagle3
_KINDS = {"dflash": DFlashDrafter, "eagle3": Eagle3Drafter}


def build_llms(
    loaded: LoadedTarget, drafters: Mapping[str, _DrafterSpec], config: EngineConfig, costs: Path | None = None
) -> dict[str, LLM]:
    """One `LLM` per kind of drafter and one without, all around the same target.

    Drafters may copy rows of the target's head, so all are built before the first `LLM` packs the target's weights; the
    others find them packed. `costs`: step costs for pilots that weigh them, measured with the DFlash drafter.
    """
    config = settle_dtype(config, loaded)
    placement = place_target(loaded.decoder, config)
    built: dict[str, Drafter | None] = {NO_DRAFTER: None}
    for kind, spec in drafters.items():
        built[kind] = build_drafter(spec, loaded.decoder, placement)
        if isinstance(spec, str) and kind in _KINDS and not isinstance(built[kind], _KINDS[kind]):
            raise InputError(f"{DRAFTER_OPTIONS[kind]} {spec} is no {kind} drafter")
    return {
        kind: LLM(loaded, drafter=drafter, pilot="ar", config=config, costs=costs if kind == "dflash" else None)
        for kind, drafter in built.items()
    }


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """What is measured and how; with models named and not loaded it can be sent to another process."""

    config: BenchConfig
    methods: tuple[Method, ...]
    tasks: tuple[TaskPrompts, ...]
    target: LoadedTarget | str
    drafters: Mapping[str, _DrafterSpec]  # by kind: dflash, eagle3, ngram
    engine: EngineConfig  # device, dtype and backend; the prompts decide about its bounds
    costs: Path | None = None  # step costs for the pilots of the DFlash drafter
    is_code_scored: bool = False
    reference: Reference | None = None  # plain answers to compare with; None: those of the run itself


class Site(Protocol):
    fit: Fit
    description: dict[str, Any]

    def answer_rounds(
        self, rounds: Sequence[Round], methods: Sequence[Method], progress: Progress
    ) -> Iterator[Found]: ...

    def find_differences(
        self, answers: Sequence[Answer], places: Mapping[tuple[str, str], Place]
    ) -> list[Difference]: ...

    def pick_samples(self, answers: Sequence[Answer], tasks: Sequence[TaskPrompts]) -> list[dict[str, Any]]: ...

    def step_costs(self) -> dict[str, Any]: ...


class LocalSite(Asker):
    def __init__(self, setup: BenchSetup) -> None:
        target = setup.target
        if isinstance(target, str):
            target = load_target(target, torch_dtype(setup.engine.dtype), quantize=setup.engine.quantize)
        self.tokenizer = target.tokenizer
        self.fit = fit_prompts(setup.tasks, self.tokenizer, setup.config, target.decoder.config.context_length)
        engine_config = replace(
            setup.engine,
            num_slots=setup.config.concurrency,
            token_budget=setup.config.token_budget or self.fit.token_budget(setup.config.concurrency),
            context_length=self.fit.context_length,
        )
        super().__init__(build_llms(target, setup.drafters, engine_config, setup.costs), setup.config)
        self.reference = setup.reference
        self.description = describe_run(
            setup.config, setup.methods, self.fit.tasks, self.plain, setup.drafters, self.reference
        )
        if self.reference is not None:
            self.reference.require_match(self.description, self.fit.tasks)

    def find_differences(self, answers: Sequence[Answer], places: Mapping[tuple[str, str], Place]) -> list[Difference]:
        """Against plain decoding; an exact engine needs no judge."""
        plain = plain_answers(answers) if self.reference is None else self.reference.plain
        self._require_vocabulary([*answers, *plain])
        return find_differences(answers, plain, None if self.plain.is_exact else Judge(self.plain, self.config, places))

    def _require_vocabulary(self, answers: Sequence[Answer]) -> None:
        """Refuse tokens that the target cannot have said: scores are looked up by them."""
        vocab_size = self.plain.engine.runner.decoder.config.vocab_size
        for answer in answers:
            if answer.token_ids and (largest := max(answer.token_ids)) >= vocab_size:
                where = f"the answer to {answer.prompt_id!r:.80} of task {answer.task!r:.80}"
                raise InputError(
                    f"{where} holds token {largest}, and this target knows {vocab_size}: choose another run"
                )

    def pick_samples(self, answers: Sequence[Answer], tasks: Sequence[TaskPrompts]) -> list[dict[str, Any]]:
        """The first prompt's first answer of every task, token by token, so that a report needs no tokenizer.

        With it come the steps of every method that wrote the same tokens.
        """
        samples = []
        for task in tasks:
            prompt = task.prompts[0]
            found = [a for a in answers if (a.task, a.prompt_id, a.turn, a.repeat) == (task.name, prompt.id, 0, 0)]
            plain = next((answer for answer in found if answer.method == "ar"), None)
            if plain is None:
                continue
            detokenizer = IncrementalDetokenizer(
                self.tokenizer.decode
            )  # a character that spans tokens comes with the last
            pieces = [detokenizer.push(token_id) for token_id in plain.token_ids]
            pieces[-1] += detokenizer.flush()
            steps = {
                answer.method: {name: getattr(answer, name) for name in ("block_sizes", "verify_sizes", "emitted")}
                for answer in found
                if answer.token_ids == plain.token_ids
            }
            samples.append(
                {
                    "task": task.name,
                    "prompt_id": prompt.id,
                    "prompt": prompt.text[:_MAX_PROMPT_CHARACTERS],
                    "pieces": pieces,
                    "steps": steps,
                }
            )
        return samples

    def step_costs(self) -> dict[str, Any]:
        """What the pilots of the DFlash drafter weigh."""
        return self.llms["dflash"].costs.to_dict()
