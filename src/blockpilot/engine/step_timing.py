"""Times steps with the engine's own executors.

Slots are filled with random tokens; then steps with drafts and checks of several sizes run in turns, in a new order
every round, so that drift hits all alike. On the host a step is timed stage by stage; what the pilot does for it is
part of the check. What follows a check is timed apart, with as many tokens as a step usually keeps: random drafts are
hardly ever accepted. On a device steps follow each other as they do in decoding, and what counts is their pace.
Caches are rewound behind every step, so the context stays as long as it is.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Drafter, DraftRequest, Observation
from blockpilot.decoding.host_step import HostExecutor
from blockpilot.decoding.step import StepExecutor, StepRequest
from blockpilot.decoding.target import show_nobody
from blockpilot.gpu.device import on_device, wait_for
from blockpilot.pilots.base import Asked, Choice, Drafted, Pilot, PilotInputs, Selection
from blockpilot.pilots.calibration import Calibration, Calibrations
from blockpilot.pilots.cost_model import CostPoint, StepCosts
from blockpilot.pilots.growth import MAX_WIDTH, GrowthRules, falling_costs, grow_tree

if TYPE_CHECKING:
    from blockpilot.engine.llm import LLM

NUM_POSITIONS = 15
MAX_TOKENS = 64  # of one request in a check that is timed
BURST = 8  # steps that are taken together where each is enqueued before the one before has landed
USUAL_SIZES = (NUM_POSITIONS + 1, 8, 4)  # of the drafts before checks that are timed on a device
DRAFTED = 4  # tokens of the checks behind drafts that are timed
NUM_KEPT = 3  # tokens that a drafted step keeps, for the overhead
GPU_TOTALS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
AS_SCORED = Calibrations(Calibration.identity(), Calibration.identity())
Report = Callable[[str, int, int], None]  # (what is measured now, done, in all)


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    draft_sizes: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 24, 32)
    verify_totals: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)  # tokens of all requests together
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (256,)
    num_rounds: int = 9
    budget_seconds: float = 20.0  # rounds end early when it is spent; every pass runs at least once
    is_quick: bool = False

    @classmethod
    def full(cls, batch_sizes: tuple[int, ...], contexts: tuple[int, ...], *, is_gpu: bool = False) -> "ProfilePlan":
        totals = sorted({*cls.verify_totals, *GPU_TOTALS}) if is_gpu else cls.verify_totals
        return cls(verify_totals=tuple(totals), batch_sizes=batch_sizes, contexts=contexts)

    @classmethod
    def quick(
        cls, batch_sizes: tuple[int, ...] = (1,), contexts: tuple[int, ...] = (256,), *, is_gpu: bool = False
    ) -> "ProfilePlan":
        """A second or two on the default CPU pair; a GPU, where large trees pay, is timed with those too."""
        return cls(
            draft_sizes=(4, 8, 16),
            verify_totals=GPU_TOTALS if is_gpu else (1, 2, 4, 8, 10, 16, 32),
            batch_sizes=batch_sizes,
            contexts=contexts,
            num_rounds=3 if is_gpu else 15,  # a CPU does other work, too
            budget_seconds=3.0,
            is_quick=True,
        )


class Shape(NamedTuple):
    """A step that is timed."""

    draft_size: int  # 0: a plain step
    tokens: int  # of each request's check


class Sample(NamedTuple):
    """Milliseconds of one step."""

    draft: float
    check: float  # on a device all but the draft


@dataclass
class _Table:
    """Samples of one batch size and context."""

    draft: dict[int, list[float]] = field(default_factory=dict)  # by draft size
    check: dict[int, list[float]] = field(default_factory=dict)  # by tokens

    def add(self, shape: Shape, sample: Sample) -> None:
        self.check.setdefault(shape.tokens, []).append(sample.check)
        if shape.draft_size:
            self.draft.setdefault(shape.draft_size, []).append(sample.draft)


def time_steps(llm: "LLM", plan: ProfilePlan, key: Mapping[str, Any], report: Report = lambda *_: None) -> StepCosts:
    """Time the plan's steps and name the result. Needs as many free slots as the largest batch."""
    _check_plan(llm, plan)
    llm.engine.settle()
    places = [(size, context) for size in plan.batch_sizes for context in plan.contexts]
    drafts: list[CostPoint] = []
    checks: list[CostPoint] = []
    overhead: float | None = None  # of the first batch
    num_rounds = plan.num_rounds
    for done, (batch_size, context) in enumerate(places):
        report(f"batch {batch_size}, context {context}", done, len(places))
        with on_device(llm.engine.runner.device), _filled_slots(llm, batch_size, context) as probe:
            shapes = probe.shapes(plan)
            table, count = _time_rounds(probe, shapes, plan.num_rounds, plan.budget_seconds / len(places))
            rest = probe.time_rest()
        num_rounds = min(num_rounds, count)
        if overhead is None:
            overhead = rest
        more = max(rest - overhead, 0.0)  # a larger batch has more to keep and to show the drafter
        for tokens, values in table.check.items():
            checks.append(_point([value + more for value in values], tokens, batch_size, context))
        if context == plan.contexts[0] and llm.drafter is not None:
            drafts += [_point(values, size, batch_size, context) for size, values in table.draft.items()]
    report("draft and check times", len(places), len(places))
    facts = {**key, "num_rounds": num_rounds}
    return StepCosts(tuple(drafts), tuple(checks), overhead or 0.0, facts, llm.engine.runner.buckets)


class _NoDrafter:
    """Offers nothing, where there is no drafter and checks are timed all the same."""

    name = "none"
    tap_layers: tuple[int, ...] = ()
    block_size = max_block_size = NUM_POSITIONS + 1
    can_resume = False

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        return [_random_draft(1)] * len(requests)

    def forget(self, slot: int) -> None: ...

    def resume(self, slot: int, token_ids: Sequence[int]) -> None: ...


@dataclass
class _ProbePilot(Pilot):
    """Checks trees of a fixed number of tokens, on the host out of a draft of its own: a real one may be too small."""

    tokens: int
    draft: HostDraft
    name: str = "probe"
    num_candidates: int = MAX_WIDTH

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [Choice(0, self.tokens - 1, calibrations=AS_SCORED)] * len(requests)

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        rules = GrowthRules(falling_costs(self.tokens - 1), NUM_POSITIONS, AS_SCORED.greedy)
        return [grow_tree(self.draft, request.anchor_id, rules) for request in requests]


class _Probe:
    """Slots of one engine, filled to one context length."""

    def __init__(self, llm: "LLM", slots: list[int], context: int) -> None:
        engine = llm.engine
        self.runner, self.slots, self.context = engine.runner, slots, context
        self.drafter: Drafter = _NoDrafter() if llm.drafter is None else llm.drafter
        self.device_executor = engine.device_executor
        # a drafter on the host reads the taps of plain steps, too
        is_host = engine.device_executor is None or engine.device_executor.drafter is None
        self.is_watched = llm.drafter is not None and is_host
        self.executors: list[StepExecutor] = [HostExecutor(self.runner, self.drafter)]
        if engine.device_executor is not None:
            self.executors.insert(0, engine.device_executor)
        self.vocab_size = self.runner.decoder.config.vocab_size
        self.random = random.Random(0)
        self.draft = _random_draft(self.vocab_size)
        caches = self.runner.cache, getattr(self.drafter, "cache", None)
        self.caches = [cache for cache in caches if isinstance(cache, SlotCache)]

    def fill(self, token_budget: int) -> None:
        show = show_nobody if isinstance(self.drafter, _NoDrafter) else self.drafter.observe
        for slot in self.slots:
            for start in range(0, self.context, token_budget):
                token_ids = self._tokens(min(token_budget, self.context - start))
                self.runner.prefill([(slot, token_ids)], self.drafter.tap_layers, show=show)

    def shapes(self, plan: ProfilePlan) -> list[Shape]:
        """Checks of all sizes and drafts of all sizes, on the host in the same steps."""
        sizes = sorted({min(size, self.drafter.max_block_size) for size in plan.draft_sizes})
        counts = [total // len(self.slots) for total in plan.verify_totals if total % len(self.slots) == 0]
        counts = [tokens for tokens in counts if tokens <= MAX_TOKENS]
        usual = min(USUAL_SIZES[0], self.drafter.max_block_size)
        if self.device_executor is not None and self.device_executor.drafter is not None:
            can_draft = self.device_executor.drafter.can_run
            usual = next((size for size in USUAL_SIZES if can_draft(len(self.slots), size)), usual)
            found = [Shape(usual, tokens) for tokens in counts if tokens > 1]
            found += [Shape(size, DRAFTED) for size in sizes if size != usual]
        else:
            found = [Shape(sizes[place % len(sizes)], tokens) for place, tokens in enumerate(counts) if tokens > 1]
            found += [Shape(size, DRAFTED) for size in sizes if size not in {shape.draft_size for shape in found}]
        return found + [Shape(0, 1)] * (1 in counts)

    def run(self, shape: Shape) -> Sample:
        """Take such steps, with the first executor that can."""
        requests = self._requests(shape)
        wait_for(self.runner.device)
        with self._rewinding():
            for executor in self.executors:
                started = time.perf_counter()
                ticket = executor.begin(requests)
                if ticket is not None:
                    return self._land(executor, ticket, started)
        raise AssertionError("the last executor takes every step")

    def _land(self, executor: StepExecutor, ticket: Any, started: float) -> Sample:
        is_wanted = [True] * len(self.slots)
        if executor is self.executors[-1]:  # the host's
            landed = executor.land(ticket, is_wanted)
            wait_for(self.runner.device)
            check = landed.select_seconds + landed.verify_seconds
            if self.device_executor is not None:  # counted as in the device's steps
                check = time.perf_counter() - started - landed.draft_seconds
            return Sample(1e3 * landed.draft_seconds, 1e3 * check)
        times, drafts = [], []
        for index in range(BURST):
            positions = [self.runner.cache.lengths[slot] for slot in self.slots]
            following = executor.follow(ticket, positions) if index < BURST - 1 else None
            landed = executor.land(ticket, is_wanted)
            times.append(landed.time)
            drafts.append(landed.draft_seconds)
            if following is None:
                break
            ticket = following
        pace = float(np.median(np.diff(times))) if len(times) > 1 else times[0] - started  # the first waited for launch
        draft = float(np.median(drafts[1:] or drafts))
        return Sample(1e3 * draft, 1e3 * max(pace - draft, 0.0))

    def time_rest(self) -> float:
        """Milliseconds of keeping a path and showing it to the drafter; on a device a part of its steps."""
        if self.device_executor is not None:
            return 0.0
        times = []
        for _ in range(3):
            chains = [(slot, self._tokens(NUM_KEPT)) for slot in self.slots]
            trees = [(slot, DraftTree.chain(ids[0], ids[1:])) for slot, ids in chains]
            with self._rewinding():
                result = self.runner.verify(trees, self.drafter.tap_layers)
                started = time.perf_counter()
                self.runner.keep([(slot, range(NUM_KEPT)) for slot in self.slots])
                self.drafter.observe(
                    [
                        Observation(slot, ids, result.taps, range(start, start + NUM_KEPT))
                        for (slot, ids), start in zip(chains, result.row_starts, strict=True)
                    ]
                )
                times.append(1e3 * (time.perf_counter() - started))
        return float(np.median(times))

    @contextmanager
    def _rewinding(self) -> Iterator[None]:
        """Whatever runs inside, the context stays as long as it is."""
        lengths = [(cache, slot, cache.lengths[slot]) for cache in self.caches for slot in self.slots]
        try:
            yield
        finally:
            for cache, slot, length in lengths:
                cache.rewind(slot, length)

    def _requests(self, shape: Shape) -> list[StepRequest]:
        inputs = PilotInputs(
            num_steps=1,
            context_length=self.context,
            batch_size=len(self.slots),
            num_remaining=MAX_TREE_NODES,
            max_block_size=max(self.drafter.max_block_size, 1),
            trained_block_size=self.drafter.block_size,
            temperature=0.0,
            buckets=self.runner.buckets,
        )
        pilot = _ProbePilot(
            shape.tokens, self.draft, num_candidates=MAX_WIDTH if shape.draft_size or self.is_watched else 0
        )
        choice = Choice(shape.draft_size, shape.tokens - 1, calibrations=AS_SCORED)
        params = SamplingParams()
        return [StepRequest(slot, self._tokens(1)[0], params, pilot, None, inputs, choice) for slot in self.slots]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(count)]


def _random_draft(vocab_size: int) -> HostDraft:
    """With scores between parents and children. Trees of it are bushy, as real ones are."""
    draw = np.random.default_rng(0)
    shape = (NUM_POSITIONS, MAX_WIDTH)
    first = _log_softmax(draw.normal(size=MAX_WIDTH))
    later = _log_softmax(draw.normal(size=(NUM_POSITIONS - 1, MAX_WIDTH, MAX_WIDTH)))
    log_probs = -np.sort(-_log_softmax(draw.normal(size=shape)), axis=-1)
    return Draft(draw.integers(vocab_size, size=shape), log_probs, first, later)


def _log_softmax(scores: NDArray[np.float64]) -> NDArray[np.float32]:
    sharp = 3 * scores
    found: NDArray[np.float32] = (sharp - np.log(np.exp(sharp).sum(axis=-1, keepdims=True))).astype(np.float32)
    return found


@contextmanager
def _filled_slots(llm: "LLM", batch_size: int, context: int) -> Iterator[_Probe]:
    cache = llm.engine.runner.cache
    if cache.num_free < batch_size:
        raise InputError(
            f"measuring a batch of {batch_size} needs as many free slots, and {cache.num_free} are free: "
            "measure before requests are opened, or give the engine more slots"
        )
    slots = [cache.reserve() for _ in range(batch_size)]
    try:
        probe = _Probe(llm, slots, context)
        probe.fill(llm.config.token_budget)
        yield probe
    finally:
        for slot in slots:
            cache.free(slot)
            if llm.drafter:
                llm.drafter.forget(slot)


def _time_rounds(probe: _Probe, shapes: Sequence[Shape], num_rounds: int, budget_seconds: float) -> tuple[_Table, int]:
    """Samples of every shape, and of how many rounds. The first of each only warms up, unless there was no time for a
    second: kernels are compiled, shapes recorded at first use."""
    shuffle = random.Random(0)
    samples = {shape: [probe.run(shape)] for shape in shapes}
    deadline = time.perf_counter() + budget_seconds
    for _ in range(num_rounds):
        for shape in shuffle.sample(list(samples), len(samples)):
            if time.perf_counter() < deadline:
                samples[shape].append(probe.run(shape))
    table = _Table()
    for shape, found in samples.items():
        for sample in found[1:] or found:
            table.add(shape, sample)
    return table, min(len(found[1:] or found) for found in samples.values())


def _point(values: list[float], tokens: int, batch_size: int, context: int) -> CostPoint:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return CostPoint(tokens, median, batch_size, context, (high - low) / 2 / max(median, 1e-9))


def _check_plan(llm: "LLM", plan: ProfilePlan) -> None:
    limit = llm.engine.context_length - min(llm.engine.context_length // 2, MAX_TREE_NODES)
    if max(plan.contexts) > limit:
        raise InputError(f"a context of {max(plan.contexts)} leaves no room: this target is measured up to {limit}")
    if max(plan.batch_sizes) > llm.config.num_slots:
        raise InputError(
            f"a batch of {max(plan.batch_sizes)} needs as many slots; this engine has {llm.config.num_slots}"
        )
