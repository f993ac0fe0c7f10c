"""The public face: load a pair once, then generate.

    llm = LLM("smollm2-135m")
    print(llm.generate("Why is the sky blue?").text)

`stream` yields an answer while it is being written. Several streams may be open at once: they share every step. All of
an `LLM` may be called from any thread; requests of all threads join one batch (`engine/desk.py`).
"""

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from pathlib import Path
from typing import overload

from blockpilot.core.config import EngineConfig
from blockpilot.core.device import resolve_device, torch_dtype
from blockpilot.core.errors import InputError, RequestFailedError, show_value
from blockpilot.core.progress import Report
from blockpilot.core.records import Completion, Update
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.cpu import first_difference as cpu_difference
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.probe import ProbeReport, probe
from blockpilot.engine.assemble import build_drafter, build_runner, place_target, settle_dtype
from blockpilot.engine.desk import Desk
from blockpilot.engine.engine import Engine
from blockpilot.engine.profile import ensure_costs, profile_key, read_profile
from blockpilot.gpu import first_difference as gpu_difference
from blockpilot.gpu.buckets import REQUESTS
from blockpilot.gpu.device import has_triton, on_device
from blockpilot.models.loading import LoadedTarget, load_target
from blockpilot.models.packing import pack_linears
from blockpilot.models.shipped import default_drafter
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.cost_model import CostSource, StepCosts
from blockpilot.pilots.live_costs import LiveCosts
from blockpilot.pilots.registry import load_pilot

DEFAULT_TARGET = "smollm2-135m"


class LLM:
    def __init__(
        self,
        target: str | LoadedTarget = DEFAULT_TARGET,
        *,
        drafter: str | Drafter | None = "auto",
        pilot: str | Pilot = "auto",
        config: EngineConfig | None = None,
        costs: StepCosts | Path | None = None,
        progress: Report | None = None,
    ) -> None:
        """`costs`: what steps cost, for pilots that weigh them. None: remembered, or measured when first needed, and on
        a CPU kept up to date by what steps take."""
        self.config = config or EngineConfig()
        resolve_device(self.config.device)  # refuse before anything is fetched
        if not isinstance(target, LoadedTarget):
            target = load_target(target, torch_dtype(self.config.dtype), progress, quantize=self.config.quantize)
        self.config = settle_dtype(self.config, target)
        self.target_name, self.tokenizer, decoder = target.name, target.tokenizer, target.decoder
        placement = place_target(decoder, self.config)
        self.device_type = placement.device.type
        spec = default_drafter(target.name) if drafter == "auto" else drafter
        self.drafter = build_drafter(spec, decoder, placement)
        pack_linears(decoder, placement.linear_backend)
        runner = build_runner(decoder, placement)
        instructions = f" {runner.kernels.name}" if isinstance(runner, CpuTargetRunner) else ""
        self.linear_backend = placement.linear_backend + instructions
        self.engine = Engine(
            runner,
            self.tokenizer,
            drafter=self.drafter,
            context_length=placement.context_length,
            token_budget=self.config.token_budget,
            eos_token_ids=self.tokenizer.eos_token_ids or decoder.config.eos_token_ids,
            target_name=target.name,
            reuses_prefixes=self.config.reuses_prefixes,
        )
        self.desk = Desk(self.engine)
        self._naming = threading.RLock()  # of the pilots by name
        self._costs = read_profile(costs, profile_key(self)) if isinstance(costs, Path) else costs
        self._live_costs: LiveCosts | None = None  # where nobody has given us costs
        self._pilots: dict[str, Pilot] = {}  # by name
        self.pilot = self.resolve_pilot(pilot)

    @property
    def costs(self) -> StepCosts:
        """What steps cost on this machine; the first call may measure for a second or two."""
        if self._costs is None:
            with self.desk.alone():
                self._costs = self._costs or self._measure_costs()
        return self._costs

    def _measure_costs(self) -> StepCosts:
        """On a CPU, where the machine does other work too, they are kept up to date by the steps that follow."""
        costs = ensure_costs(self)
        if self.device_type == "cpu":
            self._live_costs = self.engine.pipeline.loop.live_costs = LiveCosts(costs)
        return costs

    @property
    def _cost_source(self) -> CostSource:
        costs = self.costs
        return self._live_costs or costs

    @property
    def is_exact(self) -> bool:
        """Whether a token's logits are the same bits in every batch, tree and cut of the prompt."""
        return self.engine.runner.is_exact

    def make_room(self, num_slots: int) -> None:
        """Answer requests until so many slots are free, and admit nobody meanwhile; updates wait for their callers."""
        with self.desk.alone():
            while self.engine.runner.cache.num_free < num_slots and self.engine.scheduler.is_running:
                self.desk.deliver(self.engine.step(may_admit=False))

    def prepare(
        self,
        batch_size: int = 1,
        report: Callable[[int], None] = lambda num_requests: None,
        *,
        pilot: str | Pilot | None = None,
    ) -> None:
        """Record a GPU's passes for steps of up to that many requests now, not when they first occur; else no work.

        As requests finish, the batch shrinks: smaller ones are recorded too. `report` is told which come next: where
        kernels have to be compiled, large batches take a minute or more. With `pilot`, all steps that it may choose
        between are recorded, too.
        """
        executor = self.engine.device_executor
        if executor is None:
            return
        chosen = None if pilot is None else self.resolve_pilot(pilot)
        with self.desk.alone(), on_device(self.engine.runner.device):
            self.engine.settle()
            for size in [*(size for size in REQUESTS if size < batch_size), batch_size]:
                report(size)
                executor.prepare(size, chosen)

    def probe(self, report: Report | None = None, *, seed: int = 0) -> ProbeReport:
        """Compare logits of trees, chains, batches and cut prompts with those of plain passes, bit for bit.

        It works in free slots, on random tokens. Requests that are open go on afterwards.
        """
        runner = self.engine.runner
        find = gpu_difference.find_difference if self.device_type == "cuda" else cpu_difference.find_difference
        if not self.is_exact:
            raise InputError(why_inexact(self.device_type, self.config.dtype, runner.decoder.config.head_dim))
        with self.desk.alone(), on_device(runner.device):
            self.engine.settle()
            return probe(runner, find, seed=seed, report=report or (lambda what, done, total: None))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a collection of texts too; the first match wins
        self, prompts: str, params: SamplingParams | None = ..., *, pilot: str | Pilot | None = ..., is_raw: bool = ...
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Collection[str | list[int]],
        params: SamplingParams | Collection[SamplingParams] | None = ...,
        *,
        pilot: str | Pilot | Collection[str | Pilot] | None = ...,
        is_raw: bool = ...,
    ) -> list[Completion]: ...

    def generate(self, prompts, params=None, *, pilot=None, is_raw=False):  # type: ignore[no-untyped-def]
        """Answer one prompt or many at once. A prompt is text, or token ids; `params` and `pilot` are one or one each.

        Text goes through the chat template unless `is_raw`. If requests end with an error of their own, the others are
        finished before `RequestFailedError` is raised, which has all completions.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], params, pilot=pilot, is_raw=is_raw)[0]
        if not isinstance(prompts, Collection) or any(not isinstance(prompt, str | Collection) for prompt in prompts):
            raise InputError(
                f"prompts must be a text, or a list of texts and lists of token ids, got {show_value(prompts)}: "
                "give one prompt of token ids as [[...]]"
            )
        all_params = _one_each(params or SamplingParams(), len(prompts), "params")
        pilots = _one_each(self.pilot if pilot is None else pilot, len(prompts), "pilots")
        prompt_ids = [self._encode(prompt, is_raw=is_raw) for prompt in prompts]
        request_ids: list[int] = []
        completions: list[Completion] = []
        try:
            for ids, one, chosen in zip(prompt_ids, all_params, pilots, strict=True):
                request_ids.append(self._open(ids, one, chosen))
            for request_id in request_ids:
                completion = self.desk.wait(request_id, _is_last).completion
                assert completion is not None
                completions.append(completion)
        finally:
            self.desk.close(request_ids)
        if failed := next((completion.error for completion in completions if completion.error), None):
            raise RequestFailedError(failed, completions)
        return completions

    def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        pilot: str | Pilot | None = None,
        is_raw: bool = False,
    ) -> Iterator[Update]:
        """Yield text as it becomes final; the last update carries the completion. Closing the iterator aborts.

        `RequestFailedError` ends an answer that cannot go on.
        """
        chosen = self.pilot if pilot is None else pilot
        request_id = self._open(self._encode(prompt, is_raw=is_raw), params or SamplingParams(), chosen)
        try:
            is_finished = False
            while not is_finished:
                update = self.desk.wait(request_id)
                if update.completion is not None and update.completion.error:
                    raise RequestFailedError(update.completion.error, [update.completion])
                yield update
                is_finished = update.completion is not None
        finally:
            self.desk.close([request_id])

    def _encode(self, prompt: str | Collection[int], *, is_raw: bool) -> Collection[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt.strip():
            raise InputError("the prompt is empty: write something to answer")
        return self.tokenizer.encode(prompt) if is_raw else self.tokenizer.encode_chat(prompt)

    def resolve_pilot(self, pilot: str | Pilot) -> Pilot:
        """A pilot by name, for this pair; the same object every time."""
        if not isinstance(pilot, str):
            return pilot
        with self._naming:  # one object for all threads: pilots are asked for all of their requests at once
            if pilot not in self._pilots:
                self._pilots[pilot] = load_pilot(
                    pilot,
                    has_drafter=self.drafter is not None,
                    target=self.target_name,
                    drafter=self.drafter.name if self.drafter else "",
                    max_block_size=self.drafter.max_block_size if self.drafter else None,
                    costs=lambda: self._cost_source,
                )
            return self._pilots[pilot]

    def _open(self, prompt_ids: Collection[int], params: SamplingParams, pilot: str | Pilot) -> int:
        return self.desk.open(self.engine.make_request(prompt_ids, params, self.resolve_pilot(pilot)))


def _is_last(update: Update) -> bool:
    return update.completion is not None


def why_inexact(device_type: str, dtype: str, head_dim: int | None = None) -> str:
    """Why an engine promises no bits, and what to do; `head_dim` is the target's."""
    if device_type == "cpu":
        return f"{dtype} on a CPU has no exact path, its answers are audited by bench instead: use --dtype int8"
    if not has_triton():
        return "without Triton a GPU has no exact path: install it with `pip install triton`"
    return f"heads of size {head_dim} in {dtype} have no exact path on this GPU: use bfloat16, or another target"


def _one_each(value, count: int, what: str) -> list:  # type: ignore[no-untyped-def, type-arg]
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InputError(f"{count} prompts but {len(value)} {what}: give one, or one each")
    return list(value)
