"""The adaptive pilot: before every step a draft size, after every draft as many nodes as pay.

Both decisions maximise the same figure, expected tokens per millisecond, with what is known at that time: a forecast
from the last steps before drafting, the draft's own calibrated probabilities after it. Where drafting cannot win the
request decodes plainly and probes now and then. Decisions depend on inputs alone, never on a clock: replay repeats
them exactly.
"""

import copy
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Nodes, Pilot, PilotInputs, PrefillState
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.forecast import HEAD, Forecast, Recent
from blockpilot.pilots.growth import (
    Growth,
    Stream,
    best_first,
    grow_by_cost,
    likeliest_chain,
    proposed_chain,
    proposed_nodes,
)

DRAFT_SIZES = (4, 8, 16)
WIDTH = 16  # candidates per position a tree may branch into
SIZE_MARGIN = 1.03  # what a smaller draft must promise over a larger one: forecasts are noisy, larger drafts show more
LEAVE, RETURN = 0.97, 1.03  # speed of drafting over plain decoding below which it ends, above which it begins again
FIRST_WAIT, LAST_WAIT = 8, 64  # plain steps between probes; doubled after each that fails


@dataclass
class Gate:
    """Whether to draft at all."""

    is_closed: bool = False
    wait: int = FIRST_WAIT
    num_plain: int = 0  # steps since the gate closed or the last probe

    def is_open(self, advantage: float, limit: float) -> bool:
        """`advantage`: expected speed of drafting over plain decoding; `limit`: the same if every node were right."""
        if self.is_closed and advantage > RETURN:
            self.is_closed, self.wait = False, FIRST_WAIT
        elif not self.is_closed and advantage < LEAVE:
            self.is_closed, self.num_plain = True, 0
        if not self.is_closed:
            return True
        if self.num_plain >= self.wait and limit > RETURN:
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
        self._growth: Growth | None = None  # what the last step checked; None: it did not draft

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
        sizes = [size for size in self.draft_sizes if size <= inputs.max_block_size]
        if not sizes:
            return 0
        expected = np.minimum(self._forecast.expected(self.recent)[: len(sizes)], inputs.num_remaining)
        expected = np.minimum.accumulate(expected[::-1], axis=0)[::-1]  # a larger draft shows what a smaller one does
        rest = self._rest_ms(inputs)
        drafts = np.array([self.costs.draft_ms(size, inputs.batch_size) for size in sizes])
        step_ms = drafts[:, None] + rest  # [sizes, nodes + 1]
        counts = (expected / step_ms[:, None]).argmax(axis=-1)  # [sizes, levels]: nodes that will be checked
        tokens = np.take_along_axis(expected, counts[..., None], axis=-1).sum(axis=(1, 2))
        rates = tokens / np.take_along_axis(step_ms, counts, axis=-1).sum(axis=-1)
        best = len(sizes) - 1
        for smaller in range(best - 1, -1, -1):
            best = smaller if rates[smaller] > SIZE_MARGIN * rates[best] else best
        reach = np.minimum(np.arange(1, len(rest) + 1), sizes[best])
        limit = float((reach / step_ms[best]).max())
        is_open = self.gate.is_open(float(rates[best] * rest[0]), limit * float(rest[0]))
        return sizes[best] if is_open else 0

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        depth = min(candidates.num_positions, inputs.num_remaining - 1)  # deeper tokens could not be emitted
        draft_ms = self.costs.draft_ms(candidates.num_positions + 1, inputs.batch_size)
        step_ms = (draft_ms + self._rest_ms(inputs)).tolist()
        calibration = self.sampled if self.sampled is not None and inputs.temperature > 0 else self.calibration
        self._growth = self._grow(candidates, calibration, depth, step_ms)
        return self._growth.nodes

    def _rest_ms(self, inputs: PilotInputs) -> np.ndarray:
        """A step's milliseconds without the draft [nodes + 1], if every request of the batch checks as many nodes."""
        count = self._forecast.num_nodes + 1
        return self.costs.verify_row(count, inputs.batch_size, inputs.context_length) + self.costs.overhead_ms

    def _grow(self, candidates: Candidates, calibration: Calibration, depth: int, step_ms: list[float]) -> Growth:
        nodes: Stream
        if candidates.tree is not None:  # grown by the drafter: pruned as it is scored
            chain = proposed_chain(candidates.tree)
            nodes = proposed_chain(candidates.tree) if self.is_chain else proposed_nodes(candidates.tree)
        else:
            first, later = calibration.probabilities(candidates, WIDTH)
            given = (first, later[: max(depth - 1, 0)], candidates.token_ids[:depth])
            chain = likeliest_chain(*given)
            nodes = likeliest_chain(*given) if self.is_chain else best_first(*given)
        self.recent.record_draft([path for path, _, _ in islice(chain, HEAD)])
        return grow_by_cost(nodes, step_ms, self.recent.trust)
