"""The adaptive pilot: before every step a draft size, after every draft as many nodes as pay.

Both decisions maximise the same figure, expected tokens per millisecond, with what is known at that time: a forecast
from the last steps before drafting, the draft's own calibrated probabilities after it. Where drafting cannot win the
request decodes plainly and probes now and then. Decisions never depend on a clock: replay repeats those of a request
exactly, unless it shared them with a batch (`together.py`).
"""

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from blockpilot.core.candidates import Candidates, CandidateStack, shared_stack
from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Ahead, Asked, Drafted, Habits, Nodes, Outcome, Pilot, PilotInputs, PrefillState
from blockpilot.pilots.batch import in_groups
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts, Values
from blockpilot.pilots.forecast import Forecast, Recent
from blockpilot.pilots.gate import Gate
from blockpilot.pilots.growth import Forest, Growth, falling_costs, grow_calibrated, grow_stacked
from blockpilot.pilots.step_table import StepTable, StepTables
from blockpilot.pilots.together import Together

DRAFT_SIZES = (4, 8, 16)
REVIEW = 4  # steps that keep what was chosen before a draft: forecasts move slowly, and asking for one takes time
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
        self._checked: tuple[int, float] | None = None  # depth and promise of the last step's nodes; None: no draft
        self._size, self._num_kept = 0, 0  # the draft size that was chosen last, and for how many more steps it holds
        self._num_nodes = 0  # chosen with it, where checks are padded
        sampled = self.calibration if self.sampled is None else self.sampled
        self._weights = self.calibration.plain_weights, sampled.plain_weights
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
        started.recent, started.gate, started._checked, started._was_shared = Recent(), Gate(), None, False
        started._num_kept = 0
        self._together.join(started)
        return started

    def forget(self) -> None:
        """Everything that steps have taught, as if the request and its batch had just begun."""
        self.recent, self.gate, self._checked, self._num_kept = Recent(), Gate(), None, 0
        self._together.forget()

    @property
    def team(self) -> object:
        return self._together

    def choose(self, inputs: PilotInputs) -> int:
        if self._is_shared(inputs):
            return self._choose_together([(self, inputs)])[0]
        recent, _ = self._memory(inputs)
        if self._checked is not None:
            recent.record_steps([(inputs.last_emitted, *self._checked)])
            self._checked = None
        if self._num_kept and self._size <= inputs.max_block_size:
            self._num_kept -= 1
            return self._size
        self._num_kept = 0
        count = bisect_right(self.draft_sizes, inputs.max_block_size)
        if not count:
            return 0
        table = self._tables.at(inputs.batch_size, inputs.context_length)
        if self._is_padded:
            best, self._num_nodes, _ = self._choose_check(recent, self.gate, table, count)
            is_open = best >= 0
        else:
            best, rate = self._forecast.best_size(recent, table.step_ms, count, inputs.num_remaining)
            is_open = self._is_open(self.gate, table, best, rate)
        if not is_open:
            return 0
        self._size, self._num_kept = self.draft_sizes[best], 0 if self.gate.is_closed else REVIEW - 1  # or a probe
        return self._size

    def select(self, inputs: PilotInputs, candidates: Candidates) -> Nodes:
        return self._grow(inputs, candidates).nodes

    def select_tree(self, inputs: PilotInputs, candidates: Candidates, anchor_id: int) -> DraftTree:
        return self._grow(inputs, candidates).tree(anchor_id).up_to(inputs.num_remaining - 1)

    def ahead(self, inputs: PilotInputs) -> Ahead | None:
        if not self._is_padded:
            return None
        return Ahead(self._decided_nodes(inputs), self.is_chain, self._weights)

    @property
    def habits(self) -> Habits | None:
        return Habits(self.draft_sizes, Ahead(0, self.is_chain, self._weights)) if self._is_padded else None

    @property
    def learns(self) -> bool:
        return True

    def learn(self, team: Sequence[Outcome]) -> None:
        recent, weight = self._memory(team[0].inputs)
        recent.record_drafts([outcome.head for outcome in team], weight)
        for outcome in team:
            cast(StepPilot, outcome.pilot)._checked = outcome.depth, outcome.promised

    def choose_sizes(self, team: Sequence[Asked]) -> list[int]:
        if not self._is_shared(team[0][1]):
            return super().choose_sizes(team)
        return self._choose_together(cast(Sequence[StepAsked], team))

    def select_trees(self, team: Sequence[Drafted]) -> list[DraftTree]:
        first = team[0][1]
        stack = shared_stack([candidates for _, _, candidates, _ in team]) if self._is_shared(first) else None
        if stack is None or switch.load_compiled() is None:
            return super().select_trees(team)
        forest = self._grow_stacked(stack, team)
        for (pilot, _, _, _), checked in zip(cast(Sequence[StepDrafted], team), forest.checked, strict=True):
            pilot._checked = checked
        self._together.recent.record_drafts(forest.heads, 1 / first.batch_size)
        return forest.trees

    def _grow(self, inputs: PilotInputs, candidates: Candidates) -> Growth:
        recent, weight = self._memory(inputs)
        num_positions = candidates.num_positions
        if self._is_padded:
            costs = falling_costs(self._decided_nodes(inputs))  # take them all
        else:
            table = self._tables.at(inputs.batch_size, inputs.context_length)
            costs = table.growth(num_positions + 1)
        growth, head = grow_calibrated(
            candidates,
            self._calibration(inputs.temperature),
            costs,
            trust=recent.trust,
            depth=_usable_depth(num_positions, inputs),
            width=WIDTH,
            is_chain=self.is_chain,
        )
        recent.record_drafts([head], weight)
        self._checked = growth.depth, growth.promised
        return growth

    def _grow_stacked(self, stack: CandidateStack, team: Sequence[Drafted]) -> Forest:
        """All trees in one call, or in two if requests differ in calibration."""
        draft = team[0][2]
        num_positions, width, trust = draft.num_positions, min(draft.width, WIDTH), self._together.recent.trust
        costs = falling_costs(self._together.num_nodes)  # the number is decided: take them all

        def grow(group: Sequence[Drafted]) -> Forest:
            requests = [
                (one.row, anchor_id, _usable_depth(num_positions, inputs)) for _, inputs, one, anchor_id in group
            ]
            weights = self._calibration(group[0][1].temperature).plain_weights
            return grow_stacked(stack, requests, weights, costs, trust=trust, width=width, is_chain=self.is_chain)

        if self.sampled is None:
            return grow(team)
        calibrations = [self._calibration(inputs.temperature) for _, inputs, _, _ in team]
        grown = in_groups(team, calibrations, lambda group: list(zip(*grow(group), strict=True)))
        return Forest(*(list(part) for part in zip(*grown, strict=True)))

    def _calibration(self, temperature: float) -> Calibration:
        return self.sampled if self.sampled is not None and temperature > 0 else self.calibration

    @property
    def _is_padded(self) -> bool:
        """Whether the number of nodes is decided before the draft: where a check is padded to one of few sizes."""
        return bool(self.costs.padding)

    def _is_shared(self, inputs: PilotInputs) -> bool:
        return inputs.batch_size > 1 and self._is_padded

    def _decided_nodes(self, inputs: PilotInputs) -> int:
        return self._together.num_nodes if self._is_shared(inputs) else self._num_nodes

    def _memory(self, inputs: PilotInputs) -> tuple[Recent, float]:
        """What decisions look at, and what a draft or step of this request weighs there: below 1 where it is shared."""
        if self._is_shared(inputs):
            self._was_shared = True
            return self._together.recent, 1 / inputs.batch_size
        if self._was_shared and not self.recent.has_drafted:
            self.recent = replace(self._together.recent)  # left alone, a request goes on from what all have seen
        return self.recent, 1.0

    def _choose_together(self, team: Sequence["StepAsked"]) -> list[int]:
        """One size for all, decided when the first of a round asks: others have not yet told what came of the last."""
        together, (_, first) = self._together, team[0]
        weight = 1 / first.batch_size
        for pilot, _ in team:
            pilot._was_shared, pilot._num_kept = True, 0
        count = bisect_right(self.draft_sizes, first.max_block_size)  # all have one drafter
        if not count:
            together.recent.record_steps(_outcomes(team), weight, together.foretold)
            return [0] * len(team)
        begin = together.find_beginner([pilot for pilot, _ in team])
        together.recent.record_steps(_outcomes(team[: begin + 1]), weight, together.foretold)
        sizes = [together.draft_size] * begin
        if begin < len(team):
            self._begin_round(team[begin][1], count)
            together.recent.record_steps(_outcomes(team[begin + 1 :]), weight, together.foretold)
        return sizes + [together.draft_size] * (len(team) - begin)

    def _begin_round(self, inputs: PilotInputs, count: int) -> None:
        together = self._together
        if together.num_kept and inputs.batch_size == together.batch_size:
            together.num_kept -= 1
            return
        table = self._tables.at(inputs.batch_size, inputs.context_length)
        recent, gate = together.recent, together.gate
        is_guess = not recent.has_drafted
        best, together.num_nodes, foretold = self._choose_check(recent, gate, table, count, recent.scale)
        together.foretold = foretold if best >= 0 else together.foretold
        together.draft_size = self.draft_sizes[best] if best >= 0 else 0
        together.batch_size, together.num_kept = inputs.batch_size, 0 if is_guess or gate.is_closed else REVIEW - 1

    def _choose_check(
        self, recent: Recent, gate: Gate, table: StepTable, count: int, scale: float = 1.0
    ) -> tuple[int, int, float]:
        """Which draft size, how many nodes to check, and the tokens forecast of them; -1: do not draft."""
        best, num_nodes, rate = self._forecast.best_check(recent, table.step_ms, count, scale)
        if not self._is_open(gate, table, best, rate):
            return -1, 0, 0.0
        if gate.is_closed:  # a probe that checked nothing would teach nothing
            num_nodes = max(num_nodes, int(self._limits(table, best).argmax()))
            return best, num_nodes, float(self._forecast.expected(recent)[best, :, num_nodes].mean()) - 1
        return best, num_nodes, (rate * float(table.step_ms[best, num_nodes]) - 1) / scale

    def _is_open(self, gate: Gate, table: StepTable, best: int, rate: float) -> bool:
        """Whether to draft at the best size, which promises so many tokens per millisecond."""
        return gate.is_open(rate * table.plain_ms, lambda: float(self._limits(table, best).max()) * table.plain_ms)

    def _limits(self, table: StepTable, best: int) -> Values:
        """Tokens per millisecond [nodes + 1] if every node were right."""
        reach = np.minimum(np.arange(1, len(table.rest_ms) + 1), self.draft_sizes[best])
        limits: Values = reach / table.step_ms[best]
        return limits


StepAsked = tuple[StepPilot, PilotInputs]
StepDrafted = tuple[StepPilot, PilotInputs, Candidates, int]


def _outcomes(team: Sequence[StepAsked]) -> list[tuple[int, int, float]]:
    """What came of the nodes that were checked last, by those who drafted: as `Recent.record_steps` takes it."""
    found = []
    for pilot, inputs in team:
        if pilot._checked is not None:
            found.append((inputs.last_emitted, *pilot._checked))
            pilot._checked = None
    return found


def _usable_depth(num_positions: int, inputs: PilotInputs) -> int:
    """Deeper tokens cannot be emitted."""
    return max(min(num_positions, inputs.num_remaining - 1), 0)
