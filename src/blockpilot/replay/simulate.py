"""Any pilot on a trace, exactly as the decode loop would run it, without a model; and the best that could be done.

Each step mirrors `engine/speculative_step.py`: the pilot chooses, sees the drafter's candidates and selects nodes, the
tree is walked along the answer's own tokens, and the pilot learns what came of it. Token ids are ranks here: the
answer's token at a depth is its rank among the candidates.

A whole chain whose size was recorded reads its emitted lengths straight from the trace. Others see the candidates that
were kept: exact where the trace keeps as many as the pilot asks for, in float32, rounding of the drafter excepted.

On a device steps are pipelined: step n + 1 is chosen before step n has landed (`is_pipelined`), from what was known
when n was enqueued. Then the pilot learns one step late, as it does there.

The oracles know afterwards which block size was the best one, per request and per step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.decoding.verification import accept
from blockpilot.pilots.base import Asked, Choice, Drafted, Outcome, Pilot, PilotInputs
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.traces import ABSENT, Trace


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    anchor: int  # answer index of the step's anchor
    block_size: int  # draft size; 1: plain decoding
    verify_size: int
    emitted: int
    milliseconds: float = 0.0  # of drafting and checking; 0 where no costs were given


@dataclass(frozen=True)
class Totals:
    num_steps: int
    emitted: int
    milliseconds: float

    @property
    def tau(self) -> float:
        return self.emitted / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.emitted / self.milliseconds if self.milliseconds else 0.0


def total(walks: Iterable[Sequence[SimulatedStep]]) -> Totals:
    """All steps of many requests together."""
    steps = [step for walk in walks for step in walk]
    return Totals(len(steps), sum(step.emitted for step in steps), sum(step.milliseconds for step in steps))


def simulate(
    trace: Trace, pilot: Pilot, costs: StepCosts | None = None, *, is_pipelined: bool = False
) -> list[SimulatedStep]:
    """The steps that `pilot` takes through a request's answer, as the only request."""
    request = _Request(trace, pilot, costs.padding if costs else (), is_pipelined)
    steps = _walk(trace, request.step)
    return [_price(trace, step, costs) for step in steps]


def _walk(trace: Trace, step_at: Callable[[int], SimulatedStep]) -> list[SimulatedStep]:
    """The steps from the first anchor to the answer's end."""
    steps: list[SimulatedStep] = []
    anchor = 0
    while anchor < trace.num_anchors:
        steps.append(step_at(anchor))
        if steps[-1].emitted < 1:
            raise InputError(
                f"the trace of {trace.prompt_id!r:.80} tells nothing about anchor {anchor}: collect it again"
            )
        anchor += steps[-1].emitted
    return steps


@dataclass
class _Request:
    """A request on its way through its answer."""

    trace: Trace
    pilot: Pilot
    buckets: tuple[int, ...]
    is_pipelined: bool
    num_steps: int = 0
    chosen: Choice | None = None  # for the next step, made while this one is in flight
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.pilot.start(self.trace.prefill_state() if self.pilot.reads_prefill else None)

    def step(self, anchor: int) -> SimulatedStep:
        inputs = self._inputs(anchor)
        self.num_steps += 1
        if inputs.num_remaining <= 1:
            return _plain_step(anchor)
        choice = self.chosen or self._choose(inputs)
        # one more step is enqueued, or at least chosen, unless this one may be the last
        is_followed = self.is_pipelined and inputs.num_remaining > max(choice.draft_size, 1)
        self.chosen = self._choose(inputs) if is_followed else None
        size = min(choice.draft_size, inputs.max_block_size)
        if size <= 1:
            return _plain_step(anchor)
        if choice.is_whole_chain and size in self.trace.setting.sizes:
            return chain_step(self.trace, size, anchor)
        return self._drafted_step(anchor, inputs, choice, size)

    def _choose(self, inputs: PilotInputs) -> Choice:
        return self.pilot.choose([Asked(self.memory, inputs)])[0]

    def _drafted_step(self, anchor: int, inputs: PilotInputs, choice: Choice, size: int) -> SimulatedStep:
        trace = self.trace
        draft = trace.candidates(size, anchor, self.pilot.num_candidates)
        tree, promised, head = self.pilot.select([Drafted(self.memory, inputs, choice, draft, ABSENT)])[0]
        true_ranks = [*trace.draft(size).true_ranks[anchor].tolist(), ABSENT]  # nothing is drafted below the last depth
        accepted = accept(tree, [true_ranks[min(depth, size - 1)] for depth in tree.depths])
        emitted = min(len(accepted.emitted_ids), trace.num_anchors - anchor)
        self.pilot.learn([Outcome(self.memory, inputs, tree.max_depth, promised, head, emitted)])
        return SimulatedStep(anchor=anchor, block_size=size, verify_size=len(tree), emitted=emitted)

    def _inputs(self, anchor: int) -> PilotInputs:
        """The values that `Sequence.pilot_inputs` gives when the answer ends with this anchor."""
        trace = self.trace
        return PilotInputs(
            num_steps=self.num_steps,
            context_length=trace.num_prompt_tokens + anchor,
            batch_size=1,
            num_remaining=trace.max_new_tokens - anchor - 1,
            max_block_size=trace.setting.max_block_size,
            trained_block_size=trace.setting.trained_block_size,
            temperature=trace.temperature,
            buckets=self.buckets,
        )


def walk_chain(trace: Trace, size: int, costs: StepCosts | None = None) -> list[SimulatedStep]:
    """The steps of a chain drafted and checked at one size; 1 is plain decoding."""
    return _walk(trace, partial(chain_step, trace, size, costs=costs))


def chain_step(trace: Trace, size: int, anchor: int, *, costs: StepCosts | None = None) -> SimulatedStep:
    """One step of a chain. Like the engine, it checks no more than may be emitted and does not draft the last token."""
    num_remaining = trace.max_new_tokens - anchor - 1
    if size == 1 or num_remaining <= 1:
        step = _plain_step(anchor)
    else:
        emitted = int(trace.emitted[anchor, trace.column(size)])
        step = SimulatedStep(anchor=anchor, block_size=size, verify_size=min(size, num_remaining), emitted=emitted)
    return _price(trace, step, costs)


def _price(trace: Trace, step: SimulatedStep, costs: StepCosts | None) -> SimulatedStep:
    """The drafter looks at tokens of plain steps together, before the next draft: nearly for nothing."""
    if costs is None:
        return step
    draft = costs.draft_ms(step.block_size) + costs.overhead_ms if step.block_size > 1 else 0.0
    verify = costs.verify_ms(step.verify_size, context_length=trace.num_prompt_tokens + step.anchor)
    return replace(step, milliseconds=draft + verify)


def _plain_step(anchor: int) -> SimulatedStep:
    return SimulatedStep(anchor=anchor, block_size=1, verify_size=1, emitted=1)


def oracle_request(trace: Trace, sizes: Sequence[int], costs: StepCosts) -> tuple[int, list[SimulatedStep]]:
    """The one chain size that finishes this request soonest, and its steps; the smaller where two take alike."""
    walks = [(size, walk_chain(trace, size, costs)) for size in sorted(sizes)]
    return min(walks, key=lambda walk: total([walk[1]]).milliseconds)


def oracle_steps(trace: Trace, costs: StepCosts, *, sizes: Sequence[int] | None = None) -> list[SimulatedStep]:
    """The cheapest way to the answer's end when every step may draft and check another chain size, or decode plainly.

    From the last anchor back: the cheapest rest behind every anchor is that of its best step. A request that never
    drafts is spared the drafter's look at every step, so that way is weighed as a whole.
    """
    if not trace.setting.is_every_anchor:
        raise InputError("the per-step oracle needs traces of every anchor: collect with --anchors every")
    allowed = sorted({1, *(trace.setting.sizes if sizes is None else sizes)})
    rest = [0.0] * (trace.num_anchors + 1)  # milliseconds from here to the end
    best: dict[int, SimulatedStep] = {}
    for anchor in range(trace.num_anchors - 1, -1, -1):
        steps = [chain_step(trace, size, anchor, costs=costs) for size in allowed]
        best[anchor] = min(steps, key=lambda step: step.milliseconds + rest[step.anchor + step.emitted])
        rest[anchor] = best[anchor].milliseconds + rest[anchor + best[anchor].emitted]
    walk = _walk(trace, best.__getitem__)
    plain = walk_chain(trace, 1, costs)
    return plain if total([plain]).milliseconds < total([walk]).milliseconds else walk
