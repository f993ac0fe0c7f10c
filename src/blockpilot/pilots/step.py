"""The adaptive pilot: before every step a draft size, after every draft as many nodes as pay.

Both decisions maximise the same figure, expected tokens per millisecond, with what is known at that time: a forecast
from the last steps before drafting, the draft's own calibrated probabilities after it. Where drafting cannot win the
request decodes plainly and probes now and then. Decisions depend on inputs alone, never on a clock: replay repeats
them exactly.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.core.errors import InputError
from blockpilot.pilots import switch
from blockpilot.pilots.base import Nodes, Pilot, PilotInputs, PrefillState
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.forecast import Forecast, Recent
from blockpilot.pilots.growth import Growth, grow_calibrated
from blockpilot.pilots.step_table import StepTables

DRAFT_SIZES = (4, 8, 16)
WIDTH = 16  # candidates per position a tree may branch into
LEAVE, RETURN = 0.97, 1.03  # speed of drafting over plain decoding below which it ends, above which it begins again
FIRST_WAIT, LAST_WAIT = 8, 64  # plain steps between probes; doubled after each that fails


@dataclass
class Gate:
    """Whether to draft at all."""

    is_closed: bool = False
    wait: int = FIRST_WAIT
    num_plain: int = 0  # steps since the gate closed or the last probe

    def is_open(self, advantage: float, limit: Callable[[], float]) -> bool:
        """`advantage`: expected speed of drafting over plain decoding; `limit`: the same if every node were right."""
        if self.is_closed and advantage > RETURN:
            self.is_closed, self.wait = False, FIRST_WAIT
        elif not self.is_closed and advantage < LEAVE:
            self.is_closed, self.num_plain = True, 0
        if not self.is_closed:
            return True
        if self.num_plain >= self.wait and limit() > RETURN:
            self.num_plain, self.wait = 0, min(2 * self.wait, LAST_WAIT)
            return True
        self.num_plain += 1
        return False


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
        started.recent, started.gate, started._growth = Recent(), Gate(), None
        return started

    def choose(self, inputs: PilotInputs) -> int:
        if self._growth is not None:
            checked, self._growth = self._growth, None
            self.recent.record_step(emitted=inputs.last_emitted, depth=checked.depth, promised=checked.promised)
        count = bisect_right(self.draft_sizes, inputs.max_block_size)
        if not count:
            return 0
        table = self._tables.at(inputs.batch_size, inputs.context_length)
        best, rate = self._forecast.best_size(self.recent, table.step_ms, count, inputs.num_remaining)
        size, plain_ms = self.draft_sizes[best], float(table.rest_ms[0])

        def limit() -> float:
            reach = np.minimum(np.arange(1, len(table.rest_ms) + 1), size)
            return float((reach / table.step_ms[best]).max()) * plain_ms

        return size if self.gate.is_open(rate * plain_ms, limit) else 0

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        table = self._tables.at(inputs.batch_size, inputs.context_length)
        self._growth, head = grow_calibrated(
            candidates,
            self.sampled if self.sampled is not None and inputs.temperature > 0 else self.calibration,
            table.growth(candidates.num_positions + 1),
            trust=self.recent.trust,
            depth=max(min(candidates.num_positions, inputs.num_remaining - 1), 0),  # deeper tokens cannot be emitted
            width=WIDTH,
            is_chain=self.is_chain,
        )
        self.recent.record_draft(head)
        return self._growth.nodes
