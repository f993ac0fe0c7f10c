"""Times drafts and checks with the engine's own objects.

Slots are filled with random tokens; then drafts of several sizes and checks of trees of several sizes run in turns, in
a new order every round, so that drift hits all alike. What the host does for a check is part of it, the decisions of
an adaptive pilot first: on a fast GPU they take as long as checking. Nothing is kept of a pass, so the context stays as
long as it is.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.core.candidates import Candidates, stack_candidates
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.verification import accept
from blockpilot.engine.plain_step import PlainFlight, PlainRequest
from blockpilot.engine.runner import show_nobody
from blockpilot.pilots.base import Ahead, PilotInputs
from blockpilot.pilots.batch import choose_sizes, select_trees
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import CostPoint, StepCosts
from blockpilot.pilots.step import StepPilot

if TYPE_CHECKING:
    from blockpilot.engine.llm import LLM

NUM_CANDIDATES = 16
NUM_POSITIONS = 15
NUM_OBSERVED = 3  # tokens a drafted step keeps, for the overhead
MAX_TOKENS = 64  # of one request in a check that is timed
BURST = 8  # steps that are taken together where each is begun before the one before is over
JOINT_SIZES = (NUM_POSITIONS + 1, 8, 4)
DRAFTED = 4  # tokens of the checks behind drafts that are timed inside of steps
GPU_TOTALS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
AS_SCORED = Ahead(0, weights=(Calibration.identity().plain_weights,) * 2)
FREE, BEYOND = 1.0, 1e6  # imagined milliseconds: of checks up to a size, and of larger ones
Report = Callable[[str, int, int], None]  # (what is measured now, done, in all)
# ("draft" or "verify", tokens per request) -> run it once; the milliseconds, if it knows better than a clock around it
Passes = dict[tuple[str, int], Callable[[], float | None]]


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
            num_rounds=3,
            budget_seconds=3.0,
            is_quick=True,
        )


def time_steps(llm: "LLM", plan: ProfilePlan, key: Mapping[str, Any], report: Report = lambda *_: None) -> StepCosts:
    """Time the plan's passes and name the result. Needs as many free slots as the largest batch."""
    _check_plan(llm, plan)
    llm.engine.settle()
    places = [(size, context) for size in plan.batch_sizes for context in plan.contexts]
    drafts: list[CostPoint] = []
    checks: list[CostPoint] = []
    overheads: dict[int, float] = {}  # by batch size, first the smallest
    num_rounds = plan.num_rounds
    for done, (batch_size, context) in enumerate(places):
        report(f"batch {batch_size}, context {context}", done, len(places))
        is_first = context == plan.contexts[0]
        with _filled_slots(llm, batch_size, context) as bench:
            passes = bench.passes(plan, with_drafts=is_first)
            times = _time_rounds(passes, plan.num_rounds, plan.budget_seconds / len(places))
            num_rounds = min([num_rounds, *map(len, times.values())])
            if batch_size not in overheads:
                overheads[batch_size] = float(np.median([bench.overhead() for _ in range(3)]))
            first = 0.0 if llm.engine.joint else next(iter(overheads.values()))
            more = max(overheads[batch_size] - first, 0.0)  # a larger batch has more to keep and to show the drafter
            draft_ms = bench.draft_ms()
            usual = float(np.median(times.get(("draft", bench.joint_size), [0.0])))
            for (kind, tokens), values in times.items():
                if kind == "verify" and bench.is_alone(tokens):  # whole steps
                    known = draft_ms if tokens > 1 else 0.0
                    values = [max(value - known, 0.0) for value in values]
                    checks.append(_point(values, tokens, batch_size, context))
                elif kind == "verify":
                    checks.append(_point([value + more for value in values], tokens, batch_size, context))
                elif is_first:
                    rest = (
                        usual - draft_ms if bench.joint_size and bench.drafts_alone(tokens) else 0.0
                    )  # of alike steps
                    values = [max(value - rest, 0.0) for value in values]
                    drafts.append(_point(values, tokens, batch_size, context))
    report("draft and check times", len(places), len(places))
    overhead = 0.0 if llm.engine.joint else next(iter(overheads.values()))  # a device's checks are all but the draft
    facts = {**key, "num_rounds": num_rounds}
    return StepCosts(tuple(drafts), tuple(checks), overhead, facts, llm.engine.runner.padding)


class _Bench:
    """Slots of one engine, filled to one context length."""

    def __init__(self, llm: "LLM", slots: list[int], context: int) -> None:
        self.runner, self.drafter, self.slots, self.context = llm.engine.runner, llm.drafter, slots, context
        self.tap_layers = self.drafter.tap_layers if self.drafter else ()
        self.vocab_size = self.runner.decoder.config.vocab_size
        self.random = random.Random(0)
        self.joint, self.plain = llm.engine.joint, llm.engine.plain
        self.joint_size = 0  # the largest usual draft that the device takes inside of steps; 0: none
        if self.joint is not None and self.drafter is not None:
            sizes = [min(size, self.drafter.max_block_size) for size in JOINT_SIZES]
            self.joint_size = next((size for size in sizes if self.drafts_alone(size)), 0)
        self._draft_seconds: list[float] = []  # of drafts of `joint_size` inside of steps, by the device's clock
        self.candidates = stack_candidates([_make_candidates(self.vocab_size)] * len(slots))
        self.pilots: dict[int, list[StepPilot]] = {}  # by tokens per request

    def fill(self, token_budget: int) -> None:
        for slot in self.slots:
            for start in range(0, self.context, token_budget):
                token_ids = self._tokens(min(token_budget, self.context - start))
                show = show_nobody if self.drafter is None else self.drafter.observe
                self.runner.prefill([(slot, token_ids)], self.tap_layers, show=show)

    def passes(self, plan: ProfilePlan, *, with_drafts: bool) -> Passes:
        found: Passes = {}
        for total in plan.verify_totals:
            tokens = total // len(self.slots)
            if total % len(self.slots) == 0 and tokens <= MAX_TOKENS:
                found["verify", tokens] = lambda tokens=tokens: self.verify(tokens)  # type: ignore[misc]
        if self.drafter is not None and with_drafts:
            limit = self.drafter.max_block_size
            for size in sorted({min(size, limit) for size in plan.draft_sizes}):
                found["draft", size] = lambda size=size: self.draft(size)  # type: ignore[misc]
        if any(self.is_joint(tokens) for kind, tokens in found if kind == "verify"):
            found["draft", self.joint_size] = lambda: self.draft(self.joint_size)
        return found

    def draft(self, block_size: int) -> float | None:
        """Milliseconds of a whole step, where the device drafts inside of steps."""
        assert self.drafter is not None
        if self.drafts_alone(block_size):
            return self._take_steps(DRAFTED, block_size)
        self.drafter.propose(self._requests(block_size))
        return None

    def draft_ms(self) -> float:
        return 1e3 * float(np.median(self._draft_seconds or [0.0]))

    def drafts_alone(self, block_size: int) -> bool:
        return self.joint is not None and self.joint.can_run(len(self.slots), block_size, DRAFTED)

    def _requests(self, block_size: int) -> list[DraftRequest]:
        return [
            DraftRequest(
                slot=slot,
                anchor_id=self._tokens(1)[0],
                position=self.context,
                block_size=block_size,
                num_candidates=NUM_CANDIDATES,
                params=SamplingParams(),
            )
            for slot in self.slots
        ]

    def verify(self, tokens: int) -> float | None:
        """Decide on a tree of that many tokens for each request, check it and walk it, as a step does.

        Where the device does that without the host, these are the milliseconds of a whole step among others.
        """
        if self.is_joint(tokens):
            return self._take_steps(tokens, self.joint_size)
        if self.is_alone(tokens):
            return self._decode_plainly()
        trees = list(zip(self.slots, self._select(tokens), strict=True))
        result = self.runner.verify(trees, self.tap_layers)
        best = result.best_ids()
        for (slot, tree), start in zip(trees, result.row_starts, strict=True):
            accept(tree, best[start : start + len(tree)])
            self.runner.cache.keep(slot, [])
        return None

    def is_joint(self, tokens: int) -> bool:
        if self.joint is None or not self.joint_size:
            return False
        return tokens > 1 and self.joint.can_run(len(self.slots), self.joint_size, tokens)

    def is_alone(self, tokens: int) -> bool:
        """Whether the device takes steps of so many tokens without the host."""
        is_plain = tokens == 1 and self.plain is not None and self.plain.can_run(len(self.slots))
        return is_plain or self.is_joint(tokens)

    def _decode_plainly(self) -> float:
        assert self.plain is not None
        landings = []
        anchor_id, words = self._tokens(1)[0], SamplingParams().words
        requests = [PlainRequest(slot, anchor_id, self.context, words) for slot in self.slots]
        flight: PlainFlight | None = None
        for index in range(BURST):
            flight = flight or self.plain.start(requests)
            following = self.plain.follow(flight, len(requests)) if index < BURST - 1 else None
            landings.append(self.plain.land(flight, [True] * len(requests)).landed)
            flight = following
        for slot in self.slots:
            self.runner.cache.rewind(slot, self.context)
        return _pace(landings)

    def _take_steps(self, tokens: int, draft_size: int) -> float:
        """As an engine does: each begun before the step before it has landed."""
        assert self.joint is not None and self.drafter is not None
        limits = (tokens - 1, draft_size - 1)
        requests = [draft._replace(limits=limits) for draft in self._requests(draft_size)]
        flight, landings = None, []
        for index in range(BURST):
            positions = [self.runner.cache.lengths[slot] for slot in self.slots]
            if flight is None:
                placed = [one._replace(position=position) for one, position in zip(requests, positions, strict=True)]
                flight = self.joint.start(placed, AS_SCORED)
            following = self.joint.follow(flight, AS_SCORED, positions) if index < BURST - 1 else None
            joined = self.joint.land(flight, [True] * len(requests))
            landings.append(joined.landed)
            if draft_size == self.joint_size and index:
                self._draft_seconds.append(joined.draft_seconds)
            flight = following
        for slot in self.slots:
            self.runner.cache.rewind(slot, self.context)
            self.joint.drafter.cache.rewind(slot, self.context)
        return _pace(landings)

    def _select(self, tokens: int) -> list[DraftTree]:
        """Trees of adaptive pilots to whom that many tokens are free and more are not; anchors of plain decoding."""
        if tokens == 1:
            return [DraftTree.chain(1, []) for _ in self.slots]
        if tokens not in self.pilots:
            points = [CostPoint(n, ms, len(self.slots)) for n, ms in ((1, FREE), (tokens, FREE), (tokens + 1, BEYOND))]
            costs = StepCosts((), tuple(points), padding=self.runner.padding and (tokens, tokens + 1))
            pilot = StepPilot(Calibration.identity(), costs)
            self.pilots[tokens] = [pilot.start(None) for _ in self.slots]
        inputs = PilotInputs(
            num_steps=1,
            context_length=self.context,
            batch_size=len(self.slots),
            num_remaining=MAX_TREE_NODES,
            max_block_size=NUM_POSITIONS + 1,
            trained_block_size=NUM_POSITIONS + 1,
            temperature=0.0,
            last_emitted=1,
        )
        self.pilots[tokens][0].forget()  # a memory of steps that emit nothing would want fewer nodes
        choose_sizes([(pilot, inputs) for pilot in self.pilots[tokens]])
        drafts = zip(self.pilots[tokens], self.candidates, strict=True)
        return select_trees([(pilot, inputs, candidates, 1) for pilot, candidates in drafts])

    def overhead(self) -> float:
        """Milliseconds of keeping a path and showing it to the drafter; the context grows."""
        chains = [(slot, self._tokens(NUM_OBSERVED)) for slot in self.slots]
        trees = [(slot, DraftTree.chain(token_ids[0], token_ids[1:])) for slot, token_ids in chains]
        result = self.runner.verify(trees, self.tap_layers)

        def rest() -> None:
            self.runner.keep([(slot, range(len(token_ids))) for slot, token_ids in chains])
            self._observe(chains, result.taps, result.row_starts)

        return _time(rest)

    def _observe(
        self, chunks: Sequence[tuple[int, list[int]]], taps: torch.Tensor | None, row_starts: Sequence[int]
    ) -> None:
        if self.drafter is None:
            return
        self.drafter.observe(
            [
                Observation(slot, token_ids, taps, range(start, start + len(token_ids)))
                for (slot, token_ids), start in zip(chunks, row_starts, strict=True)
            ]
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(count)]


def _make_candidates(vocab_size: int) -> Candidates:
    """A draft out of nowhere, with scores between parents and children. Trees of it are bushy, as real ones are."""
    draw = np.random.default_rng(0)
    shape = (NUM_POSITIONS, NUM_CANDIDATES)
    first = _log_softmax(draw.normal(size=NUM_CANDIDATES))
    later = _log_softmax(draw.normal(size=(NUM_POSITIONS - 1, NUM_CANDIDATES, NUM_CANDIDATES)))
    log_probs = -np.sort(-_log_softmax(draw.normal(size=shape)), axis=-1)
    return Candidates(draw.integers(vocab_size, size=shape), log_probs, first, later)


def _log_softmax(scores: NDArray[np.float64]) -> NDArray[np.float32]:
    sharp = 3 * scores
    found: NDArray[np.float32] = (sharp - np.log(np.exp(sharp).sum(axis=-1, keepdims=True))).astype(np.float32)
    return found


@contextmanager
def _filled_slots(llm: "LLM", batch_size: int, context: int) -> Iterator[_Bench]:
    cache = llm.engine.runner.cache
    if cache.num_free < batch_size:
        raise InputError(
            f"measuring a batch of {batch_size} needs as many free slots, and {cache.num_free} are free: "
            "measure before requests are opened, or give the engine more slots"
        )
    slots = [cache.reserve() for _ in range(batch_size)]
    try:
        bench = _Bench(llm, slots, context)
        bench.fill(llm.config.token_budget)
        yield bench
    finally:
        for slot in slots:
            cache.free(slot)
            if llm.drafter:
                llm.drafter.forget(slot)


def _time_rounds(passes: Passes, num_rounds: int, budget_seconds: float) -> dict[tuple[str, int], list[float]]:
    """Repeated times of every pass. The first of each only warms up, unless there was no time for a second."""
    shuffle = random.Random(0)
    times = {name: [_time(run)] for name, run in passes.items()}  # kernels are compiled, shapes prepared at first use
    deadline = time.perf_counter() + budget_seconds
    for _ in range(num_rounds):
        for name in shuffle.sample(list(passes), len(passes)):
            if time.perf_counter() < deadline:
                times[name].append(_time(passes[name]))
    return {name: values[1:] or values for name, values in times.items()}


def _pace(landings: Sequence[float]) -> float:
    """Milliseconds from one to the next. The first has waited for its launch, too."""
    return 1e3 * float(np.median(np.diff(landings)))


def _time(run: Callable[[], float | None]) -> float:
    _wait_for_device()
    started = time.perf_counter()
    found = run()
    _wait_for_device()
    return 1e3 * (time.perf_counter() - started) if found is None else found


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


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
