"""The adaptive pilot: before every step a draft size, after every draft as many nodes as pay.

Both decisions maximise the same figure, expected tokens per millisecond, with what is known at that time: a forecast
from the last steps before drafting, the draft's own calibrated probabilities after it. Where drafting cannot win the
request decodes plainly and probes now and then. Decisions never depend on a clock: without copies of its own
text, replay repeats those of a request that decodes alone.

All requests of a batch wait for its one draft and its one check. If each decided alone, a single one that drafts would
hold up all, and where a device pads checks all would pay for the one that takes most. So a batch has one memory and one
draft size. Each request still grows the tree that is best for itself, and decides alone on copies out of its own text.

A device pads a check to one of few sizes (`PilotInputs.buckets`). There the number of nodes is decided with the draft
size, before the draft, and is the same for all.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blockpilot.core.draft import Copy
from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import PLAIN, Asked, Choice, Drafted, Outcome, Pilot, PilotInputs, PrefillState, Selection
from blockpilot.pilots.calibration import Calibration, Calibrations
from blockpilot.pilots.copies import NOTHING_COPIED, WeighedCopy, weigh_copy
from blockpilot.pilots.cost_model import CostSource, StepTable, StepTables, Values
from blockpilot.pilots.forecast import Forecast, load_loops
from blockpilot.pilots.growth import MAX_WIDTH, GrowthRules, falling_costs, grow_tree
from blockpilot.pilots.memory import HOPE, RETURN, Gate, StepMemory

DRAFT_SIZES = (4, 8, 16)
COPIED = Choice(0, is_copied=True)
LEAST_SCALE = 0.05  # of forecasts; 0 would hide what they say
REVIEW = 4  # steps that keep what was chosen before a draft: forecasts move slowly, and asking for one takes time


@dataclass
class StepPilot(Pilot):
    calibration: Calibration
    costs: CostSource
    is_chain: bool = False
    draft_sizes: tuple[int, ...] = DRAFT_SIZES
    forecast: Forecast | None = None  # None: no fit, for these draft sizes
    sampled: Calibration | None = None  # at temperatures above 0, where noise is part of the scores; None: the same
    sampled_forecast: Forecast | None = None  # and of steps at such temperatures; None: the same
    label: str = ""
    reads_copies: bool = False

    def __post_init__(self) -> None:
        if not self.draft_sizes or min(self.draft_sizes) < 2 or list(self.draft_sizes) != sorted(set(self.draft_sizes)):
            raise InputError(f"draft sizes must rise from 2 or more, got {self.draft_sizes}")
        greedy = self.forecast or Forecast(self.draft_sizes, is_chain=self.is_chain)
        self._forecasts = greedy, self.sampled_forecast or greedy
        wanted = self.draft_sizes, self.is_chain, greedy.num_nodes
        for one in self._forecasts:
            if (given := (one.draft_sizes, one.is_chain, one.num_nodes)) != wanted:
                raise InputError(f"the forecast is for (draft sizes, chain, nodes) {given}, the pilot for {wanted}")
        self._tables = StepTables(self.costs, self.draft_sizes, greedy.num_nodes)
        self.calibrations = Calibrations(self.calibration, self.sampled or self.calibration)
        load_loops()

    @property
    def name(self) -> str:
        return self.label or ("chain-step" if self.is_chain else "step")

    @property
    def num_candidates(self) -> int:
        return 1 if self.is_chain else MAX_WIDTH

    def start(self, prefill: PrefillState | None, neighbours: Sequence[StepMemory] = ()) -> StepMemory:
        """When the last request of a batch has gone, so has what they knew together."""
        return StepMemory(batch=neighbours[0].batch if neighbours else StepMemory())

    def rests(self, neighbours: Sequence[StepMemory]) -> bool:
        return any(one.batch is not None and one.batch.gate.is_closed for one in neighbours[:1])

    def options(self, trained_block_size: int) -> Sequence[Choice]:
        return [self._choice(size, 0) for size in self.draft_sizes]

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        first = requests[0].inputs
        if first.batch_size == 1:
            return [
                COPIED if self._pays_copied(memory.own(), memory, inputs) else self._decide(memory, inputs)
                for memory, inputs in requests
            ]
        batch: StepMemory = requests[0].memory.batch
        for memory, _ in requests:
            memory.shared()
        has_joined = all(inputs.num_steps == 0 for _, inputs in requests)
        # where the others have been asked already, what they decided holds for all
        drafted = batch.choice if has_joined and batch.batch_size else self._decide(batch, first)
        return [COPIED if self._pays_copied(batch, memory, inputs) else drafted for memory, inputs in requests]

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return [self._select(request) for request in requests]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        first = outcomes[0].inputs
        if not _is_shared(first):
            for outcome in outcomes:
                memory = outcome.memory.own()
                _record(memory, [outcome], 1.0, memory.foretold)
            return
        batch: StepMemory = outcomes[0].memory.shared()
        _record(batch, outcomes, 1 / first.batch_size, batch.foretold)

    def _select(self, request: Drafted) -> Selection:
        inputs, draft, num_nodes = request.inputs, request.draft, request.choice.num_nodes
        copied = NOTHING_COPIED
        if inputs.copy is not None:
            weighed = self._weigh_copy(request.memory, inputs, inputs.copy)
            if request.choice.is_copied:
                token_ids = list(weighed.token_ids[: weighed.num_best])
                return Selection(DraftTree.chain(request.anchor_id, token_ids), weighed.promised)
            copied = weighed.as_candidates()
        memory: StepMemory = request.memory.shared() if _is_shared(inputs) else request.memory.own()
        if num_nodes is None:
            table = self._tables.at(inputs.batch_size, inputs.context_length, inputs.buckets)
            costs = table.growth(draft.num_positions + 1)
        else:
            costs = falling_costs(num_nodes)  # the number is decided: take them all
        rules = GrowthRules(
            costs,
            depth=inputs.num_remaining - 1,  # deeper tokens cannot be emitted
            calibration=self.calibrations.of(inputs.temperature),
            trust=memory.recent.trust,
            is_chain=self.is_chain,
            copied=copied,
        )
        found = grow_tree(draft, request.anchor_id, rules)
        if num_nodes is None:
            memory.cost = float(costs[0][len(found.tree) - 1]) / table.plain_ms
        return found

    def _weigh_copy(self, memory: StepMemory, inputs: PilotInputs, copy: Copy) -> WeighedCopy:
        """Once per step; `memory` is the request's own."""
        if memory.weighed is None or memory.weighed[0] is not inputs:
            table = self._tables.at(inputs.batch_size, inputs.context_length, inputs.buckets)
            found = weigh_copy(copy, inputs.temperature, table.check_ms, inputs.num_remaining - 1)
            memory.weighed = inputs, found
        return memory.weighed[1]

    def _pays_copied(self, deciding: StepMemory, memory: StepMemory, inputs: PilotInputs) -> bool:
        """Whether a copy alone brings more than the draft that was thought of last, and than plain decoding.

        That draft would be checked beside the copy. How much more the two bring together hardly matters here.
        """
        if inputs.copy is None:
            return False
        table = self._tables.at(inputs.batch_size, inputs.context_length, inputs.buckets)
        rate = self._weigh_copy(memory, inputs, inputs.copy).rate
        return rate * table.plain_ms > max(deciding.rate, RETURN if deciding.gate.is_closed else HOPE)

    def _decide(self, memory: StepMemory, inputs: PilotInputs) -> Choice:
        is_shared = _is_shared(inputs)
        is_valid = memory.choice.draft_size <= inputs.max_block_size
        if memory.num_kept and is_valid and (not is_shared or inputs.batch_size == memory.batch_size):
            memory.num_kept -= 1
            return memory.choice
        memory.num_kept, memory.batch_size = 0, inputs.batch_size
        count = bisect_right(self.draft_sizes, inputs.max_block_size)
        memory.choice = self._weigh(memory, inputs, count, is_shared=is_shared) if count else PLAIN
        return memory.choice

    def _weigh(self, memory: StepMemory, inputs: PilotInputs, count: int, *, is_shared: bool) -> Choice:
        """One of the first draft sizes, or none; how long that holds is noted."""
        if memory.gate.rests():
            return PLAIN
        table = self._tables.at(inputs.batch_size, inputs.context_length, inputs.buckets)
        recent, gate, num_nodes = memory.recent, memory.gate, None
        forecast = self._forecasts[inputs.temperature > 0]
        is_guess = not recent.has_drafted and (is_shared or not inputs.buckets)
        if inputs.buckets:
            scale = recent.scale if is_shared else 1.0
            best, num_nodes, foretold = self._weigh_checks(memory, forecast, table, count, scale)
            memory.foretold = foretold if is_shared and best >= 0 else memory.foretold
            is_open = best >= 0
            if is_open:
                memory.cost = float(table.step_ms[best, num_nodes]) / table.plain_ms
        else:
            scale = recent.scale
            best, rate, tokens = forecast.best_size(recent, table.step_ms, count, inputs.num_remaining, scale)
            memory.foretold = (tokens - 1) / max(scale, LEAST_SCALE) if recent.has_drafted else None
            memory.cost = tokens / (rate * table.plain_ms)  # unless `select` knows better
            is_open = self._is_open(gate, table, best, rate)
            memory.rate = rate * table.plain_ms if is_open else 0.0
            if is_open and gate.is_closed:  # a probe that checked nothing would not even teach what checks cost
                num_nodes = int(self._limits(table, best).argmax())
                memory.cost = float(table.step_ms[best, num_nodes]) / table.plain_ms
        if not is_open:
            return PLAIN
        memory.num_kept = 0 if is_guess or gate.is_closed else REVIEW - 1  # a guess or a probe does not hold
        return self._choice(self.draft_sizes[best], num_nodes)

    def _weigh_checks(
        self, memory: StepMemory, forecast: Forecast, table: StepTable, count: int, scale: float
    ) -> tuple[int, int, float]:
        """Which draft size, how many nodes to check, and the tokens forecast of them; -1: do not draft."""
        recent, gate = memory.recent, memory.gate
        best, num_nodes, rate = forecast.best_check(recent, table.step_ms, count, scale)
        if not self._is_open(gate, table, best, rate):
            return -1, 0, 0.0
        if gate.is_closed:  # a probe that checked nothing would teach nothing
            num_nodes = max(num_nodes, int(self._limits(table, best).argmax()))
            return best, num_nodes, float(forecast.expected(recent)[best, :, num_nodes].mean()) - 1
        return best, num_nodes, (rate * float(table.step_ms[best, num_nodes]) - 1) / scale

    def _is_open(self, gate: Gate, table: StepTable, best: int, rate: float) -> bool:
        """Whether to draft at the best size, which promises so many tokens per millisecond."""
        plain_ms = table.plain_ms
        return gate.is_open(rate * plain_ms, lambda: float(self._limits(table, best).max()) * plain_ms)

    def _limits(self, table: StepTable, best: int) -> Values:
        """Tokens per millisecond [nodes + 1] if every node were right."""
        reach = np.minimum(np.arange(1, len(table.rest_ms) + 1), self.draft_sizes[best])
        limits: Values = reach / table.step_ms[best]
        return limits

    def _choice(self, draft_size: int, num_nodes: int | None) -> Choice:
        return Choice(draft_size, num_nodes, self.is_chain, self.calibrations)


def _is_shared(inputs: PilotInputs) -> bool:
    return inputs.batch_size > 1


def _record(
    memory: StepMemory, outcomes: Sequence[Outcome], weight: float = 1.0, foretold: float | None = None
) -> None:
    """A memory that n requests share takes the drafts and steps of each with the weight 1/n."""
    memory.recent.record_drafts([outcome.head for outcome in outcomes], weight)
    steps = [(outcome.emitted, outcome.depth, outcome.promised) for outcome in outcomes]
    memory.recent.record_steps(steps, weight, foretold)
    for outcome in outcomes:
        memory.gate.record(outcome.emitted, memory.cost, weight)
