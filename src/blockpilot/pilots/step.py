"""The adaptive pilot: before every step a draft size, after every draft as many nodes as pay.

Both decisions maximise the same figure, expected tokens per millisecond, with what is known at that time: a forecast
from the last steps before drafting, the draft's own calibrated probabilities after it. Where drafting cannot win the
request decodes plainly and probes now and then. Decisions never depend on a clock: replay repeats those of a request
exactly, unless it shared them with a batch (`together.py`).
"""

import copy
from bisect import bisect_right
from dataclasses import dataclass, field, replace

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Nodes, Pilot, PilotInputs, PrefillState
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts, Values
from blockpilot.pilots.forecast import Forecast, Recent
from blockpilot.pilots.gate import Gate
from blockpilot.pilots.growth import Growth, falling_costs, grow_calibrated
from blockpilot.pilots.step_table import StepTable, StepTables
from blockpilot.pilots.together import Together

DRAFT_SIZES = (4, 8, 16)
WIDTH = 16  # candidates per position a tree may branch into


@dataclass
class StepPilot(Pilot):
    calibration: Calibration
    costs: StepCosts
    is_chain: bool = False
    draft_sizes: tuple[int, ...] = DRAFT_SIZES
    forecast: Forecast | None = None  # None: no fit, for these draft sizes
    sampled: Calibration | None = None  # at temperatures above 0, where noise is part of the scores; None: the same
    label: str = ""
    recent: Recent = field(default_factory=Recent, init=False, repr=False, compare=False)
    gate: Gate = field(default_factory=Gate, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.draft_sizes or min(self.draft_sizes) < 2 or list(self.draft_sizes) != sorted(set(self.draft_sizes)):
            raise InputError(f"draft sizes must rise from 2 or more, got {self.draft_sizes}")
        self._forecast = self.forecast or Forecast(self.draft_sizes, is_chain=self.is_chain)
        given, wanted = [(one.draft_sizes, one.is_chain) for one in (self._forecast, self)]
        if given != wanted:
            raise InputError(f"the forecast is for (draft sizes, chain) {given}, the pilot for {wanted}")
        self._tables = StepTables(self.costs, self.draft_sizes, self._forecast.num_nodes)
        self._growth: Growth | None = None  # what the last step checked; None: it did not draft
        self._together = Together()  # shared by all requests
        self._was_shared = False  # whether this request has ever decided with others
        switch.load_compiled()

    @property
    def name(self) -> str:
        return self.label or ("chain-step" if self.is_chain else "step")

    @property
    def num_candidates(self) -> int:
        return 1 if self.is_chain else WIDTH

    def start(self, prefill: PrefillState | None) -> "StepPilot":
        """A copy that shares everything but what a request remembers."""
        started = copy.copy(self)
        started.recent, started.gate, started._growth, started._was_shared = Recent(), Gate(), None, False
        self._together.join(started)
        return started

    def forget(self) -> None:
        """Everything that steps have taught, as if the request and its batch had just begun."""
        self.recent, self.gate, self._growth = Recent(), Gate(), None
        self._together.forget()

    def choose(self, inputs: PilotInputs) -> int:
        recent, weight = self._memory(inputs)
        if self._growth is not None:
            checked, self._growth = self._growth, None
            recent.record_step(
                emitted=inputs.last_emitted, depth=checked.depth, promised=checked.promised, weight=weight
            )
        count = bisect_right(self.draft_sizes, inputs.max_block_size)
        if not count:
            return 0
        if weight < 1:
            return self._choose_together(inputs, count)
        table = self._tables.at(inputs.batch_size, inputs.context_length)
        best, rate = self._forecast.best_size(recent, table.step_ms, count, inputs.num_remaining)
        return self.draft_sizes[best] if self._is_open(self.gate, table, best, rate) else 0

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return self._grow(inputs, candidates).nodes

    def select_tree(self, inputs: PilotInputs, candidates: Candidates, anchor_id: int) -> DraftTree:
        return self._grow(inputs, candidates).tree(anchor_id).up_to(inputs.num_remaining - 1)

    def _grow(self, inputs: PilotInputs, candidates: Candidates) -> Growth:
        recent, weight = self._memory(inputs)
        num_positions = candidates.num_positions
        if weight < 1:
            costs = falling_costs(self._together.num_nodes)  # the number is decided: take them all
        else:
            table = self._tables.at(inputs.batch_size, inputs.context_length)
            costs = table.growth(num_positions + 1)
        growth, head = grow_calibrated(
            candidates,
            self.sampled if self.sampled is not None and inputs.temperature > 0 else self.calibration,
            costs,
            trust=recent.trust,
            depth=max(min(num_positions, inputs.num_remaining - 1), 0),  # deeper tokens cannot be emitted
            width=WIDTH,
            is_chain=self.is_chain,
        )
        recent.record_draft(head, weight)
        self._growth = growth
        return growth

    def _memory(self, inputs: PilotInputs) -> tuple[Recent, float]:
        """What decisions look at, and what a draft or step of this request weighs there: below 1 where it is shared."""
        if inputs.batch_size > 1 and self.costs.padding:
            self._was_shared = True
            return self._together.recent, 1 / inputs.batch_size
        if self._was_shared and not self.recent.has_drafted:
            self.recent = replace(self._together.recent)  # left alone, a request goes on from what all have seen
        return self.recent, 1.0

    def _choose_together(self, inputs: PilotInputs, count: int) -> int:
        together = self._together
        if together.begins_round(self):
            table = self._tables.at(inputs.batch_size, inputs.context_length)
            best, together.num_nodes, rate = self._forecast.best_check(together.recent, table.step_ms, count)
            is_open = self._is_open(together.gate, table, best, rate)
            together.draft_size = self.draft_sizes[best] if is_open else 0
            if is_open and together.gate.is_closed:  # a probe that checked nothing would teach nothing
                together.num_nodes = max(together.num_nodes, int(self._limits(table, best).argmax()))
        return together.draft_size

    def _is_open(self, gate: Gate, table: StepTable, best: int, rate: float) -> bool:
        """Whether to draft at the best size, which promises so many tokens per millisecond."""
        return gate.is_open(rate * table.plain_ms, lambda: float(self._limits(table, best).max()) * table.plain_ms)

    def _limits(self, table: StepTable, best: int) -> Values:
        """Tokens per millisecond [nodes + 1] if every node were right."""
        reach = np.minimum(np.arange(1, len(table.rest_ms) + 1), self.draft_sizes[best])
        limits: Values = reach / table.step_ms[best]
        return limits
