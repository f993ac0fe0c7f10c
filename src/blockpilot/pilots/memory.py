"""What a request, or a batch, remembers of its steps. Plain values: policies without state decide from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from blockpilot.pilots.base import PLAIN, Choice, PilotInputs
from blockpilot.pilots.copies import WeighedCopy

DECAY = 0.75  # what a step leaves of the old average
MAX_AVERAGE = 32.0
TRUST_PRIOR = 4.0  # tokens promised and kept before the first step: so much is a drafter trusted at first
TRUST_DECAY = 0.95
MAX_TRUST = 1.5
LEAVE, RETURN = 0.97, 1.03  # speed of drafting over plain decoding below which it ends, above which it begins again
EXPERIENCE, HOPE = 4.0, 1.15  # plain steps' worth of drafting before the first, and how much faster that was
EXPERIENCE_DECAY = 0.96  # what a drafted step leaves of it
FIRST_WAIT, LAST_WAIT = 8, 128  # plain steps between probes; doubled after each that fails


@dataclass
class Recent:
    """How the last drafts and steps went. All counts are of emitted tokens."""

    average: float = 2.5  # moving average; steps that were cut short count with what they would have gone on to emit
    last: float = 0.0  # of the last step that checked something
    expected: float = 0.0  # what the last draft promised
    has_drafted: bool = False
    promised: float = TRUST_PRIOR  # tokens that checked nodes were to bring, of late
    kept: float = TRUST_PRIOR  # and those they brought
    foretold: float = TRUST_PRIOR  # tokens that were forecast before drafts, of late
    brought: float = TRUST_PRIOR  # and those that came of these drafts, whatever was checked of them

    @property
    def trust(self) -> float:
        """What a promised token is worth in this request."""
        return min(self.kept / self.promised, MAX_TRUST)

    @property
    def scale(self) -> float:
        """What a token that was forecast is worth here: forecasts are fitted to single requests, all greedy."""
        return min(self.brought / self.foretold, MAX_TRUST)

    def record_drafts(self, drafts: Sequence[Sequence[float]], weight: float = 1.0) -> None:
        """Each: the probabilities that its likeliest chain is right up to the first positions, at most `HEAD`.

        A memory that n requests share takes the drafts and steps of each, in their order, with the weight 1/n.
        """
        more, trust, expected = self.average - 1, self.trust, self.expected
        for paths in drafts:
            promised = 1 + trust * (sum(paths) + (paths[-1] * more if paths else 0.0))
            expected = _toward(expected, promised, weight) if self.has_drafted else promised
            self.has_drafted = True
        self.expected = expected

    def record_steps(
        self, steps: Sequence[tuple[int, int, float]], weight: float = 1.0, foretold: float | None = None
    ) -> None:
        """Drafted steps: tokens emitted, depth of the nodes checked (0 if none was worth it), tokens these promised.

        `foretold`: what the forecast that chose the draft wanted of each, without the target's own; None: no forecast.

        Had a path that was right to its end gone on, it would have gone on for `average` tokens: acceptance is taken to
        have no memory. So the average does not depend on how deep the pilot dared to look.
        """
        average, last, sum_promised, kept = self.average, self.last, self.promised, self.kept
        new = weight * (1 - DECAY)
        for emitted, depth, promised in steps:
            value = self.expected
            if depth:
                last = _toward(last, float(emitted), weight) if last else float(emitted)
                value = emitted + (average - 1 if emitted > depth else 0)
                sum_promised += weight * (promised - (1 - TRUST_DECAY) * (sum_promised - TRUST_PRIOR))
                kept += weight * (emitted - 1 - (1 - TRUST_DECAY) * (kept - TRUST_PRIOR))
            if foretold is not None:
                self.foretold += weight * (foretold - (1 - TRUST_DECAY) * (self.foretold - TRUST_PRIOR))
                self.brought += weight * (emitted - 1 - (1 - TRUST_DECAY) * (self.brought - TRUST_PRIOR))
            average = (1 - new) * average + new * min(value, MAX_AVERAGE)
        self.average, self.last, self.promised, self.kept = average, last, sum_promised, kept


def _toward(old: float, new: float, weight: float) -> float:
    return new if weight == 1 else old + weight * (new - old)


@dataclass
class Gate:
    """Whether to draft at all. Closes where drafting loses to plain decoding, probes ever more rarely, opens again.

    A forecast from the last few steps is not enough to close it: a run of bad luck looks the same. The steps drafted
    so far must have lost, too.
    """

    is_closed: bool = False
    wait: int = FIRST_WAIT
    num_plain: int = 0  # steps since the gate closed or the last probe
    is_settled: bool = False  # whether the last draft's outcome has been weighed
    gained: float = EXPERIENCE * HOPE  # tokens of drafted steps, of late
    spent: float = EXPERIENCE  # and what these steps took, in plain steps

    def record(self, emitted: float, cost: float, weight: float = 1.0) -> None:
        """A drafted step; `cost` in plain steps."""
        fade = 1 - EXPERIENCE_DECAY
        self.gained += weight * (emitted - fade * (self.gained - EXPERIENCE * HOPE))
        self.spent += weight * (cost - fade * (self.spent - EXPERIENCE))

    def rests(self) -> bool:
        """Whether it stays closed for a step, whatever is forecast: nothing was drafted since the last time."""
        if not (self.is_closed and self.is_settled and self.num_plain < self.wait):
            return False
        self.num_plain += 1
        return True

    def is_open(self, advantage: float, limit: Callable[[], float]) -> bool:
        """`advantage`: expected speed of drafting over plain decoding; `limit`: the same if every node were right."""
        if self.is_closed and advantage > RETURN:
            self.is_closed, self.wait = False, FIRST_WAIT
        elif not self.is_closed and advantage < LEAVE and (self.gained < LEAVE * self.spent or limit() < RETURN):
            self.is_closed, self.num_plain = True, 0
        if not self.is_closed:
            return True
        if self.num_plain >= self.wait and limit() > RETURN:
            self.num_plain, self.wait, self.is_settled = 0, min(2 * self.wait, LAST_WAIT), False
            return True
        self.num_plain, self.is_settled = self.num_plain + 1, True
        return False


@dataclass
class StepMemory:
    """Of one request, or of the requests of a batch that decide together."""

    recent: Recent = field(default_factory=Recent)
    gate: Gate = field(default_factory=Gate)
    choice: Choice = PLAIN  # the last one
    num_kept: int = 0  # steps for which it still holds
    batch_size: int = 0  # for which it was made
    foretold: float | None = None  # tokens forecast of it, beyond the target's own; None: nothing was drafted
    rate: float = 0.0  # tokens per plain step's time that the draft which was thought of last would bring; 0: none
    cost: float = 0.0  # of the step that was last decided on, in plain steps
    batch: "StepMemory | None" = None  # of a request: what it shares with those it is decoded with
    weighed: tuple[PilotInputs, WeighedCopy] | None = None  # of a request: the copy of its last step
    was_shared: bool = False  # whether this request has ever decided with others

    def own(self) -> "StepMemory":
        """For a request that decides alone. If it only drafted in a batch, it starts from the batch's statistics."""
        if self.was_shared and self.batch is not None and not self.recent.has_drafted:
            self.recent = replace(self.batch.recent)
        return self

    def shared(self) -> "StepMemory":
        """For one that decides with its batch."""
        self.was_shared, self.num_kept = True, 0
        assert self.batch is not None
        return self.batch
