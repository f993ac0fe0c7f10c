"""Any pilot on a trace, exactly as the decode loop would run it, without a model.

Each step mirrors `engine/speculative_step.py`: the pilot chooses a draft size, sees the drafter's candidates, selects
nodes, and the tree is walked along the answer's own tokens. Token ids are ranks here: the answer's token at a depth is
its rank among the candidates.

A fixed chain whose size was recorded reads its emitted lengths straight from the trace. Others see the candidates that
were kept: exact where the trace keeps as many as the pilot asks for, in float32, rounding of the drafter excepted.
"""

from dataclasses import replace

from blockpilot.decoding.verification import accept
from blockpilot.pilots.base import Pilot, PilotInputs
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay.costs import SimulatedStep, StepCosts
from blockpilot.replay.traces import ABSENT, Trace


def simulate(trace: Trace, pilot: Pilot, costs: StepCosts | None = None, *, batch_size: int = 1) -> list[SimulatedStep]:
    """The steps that `pilot` takes through a request's answer, as one of `batch_size` requests alike."""
    pilot = pilot.start(trace.prefill_state() if pilot.reads_prefill else None)
    if isinstance(pilot, FixedPilot) and pilot.block_size in trace.setting.sizes:
        return walk_chain(trace, pilot.block_size, costs, batch_size=batch_size)
    steps: list[SimulatedStep] = []
    anchor, is_watched = 0, pilot.num_candidates > 0
    while anchor < trace.num_anchors:
        inputs = _inputs(trace, steps, anchor, batch_size)
        step = _step(trace, pilot, inputs, anchor)
        steps.append(_price(trace, step, costs, batch_size=batch_size, is_watched=is_watched))
        anchor += steps[-1].emitted
    return steps


def walk_chain(trace: Trace, size: int, costs: StepCosts | None = None, *, batch_size: int = 1) -> list[SimulatedStep]:
    """The steps of a chain drafted and checked at one size; 1 is plain decoding."""
    steps: list[SimulatedStep] = []
    anchor = 0
    while anchor < trace.num_anchors:
        step = chain_step(trace, size, anchor, costs=costs, batch_size=batch_size, is_watched=size > 1)
        steps.append(step)
        anchor += step.emitted
    return steps


def chain_step(
    trace: Trace,
    size: int,
    anchor: int,
    *,
    costs: StepCosts | None = None,
    batch_size: int = 1,
    is_watched: bool = True,
) -> SimulatedStep:
    """One step of a chain. Like the engine, it checks no more than may be emitted and does not draft the last token.

    `is_watched`: a drafter is shown what was kept, as it is unless the whole request decodes plainly.
    """
    num_remaining = trace.max_new_tokens - anchor - 1
    if size == 1 or num_remaining <= 1:
        step = _plain_step(anchor)
    else:
        emitted = int(trace.emitted[anchor, trace.column(size)])
        step = SimulatedStep(anchor=anchor, block_size=size, verify_size=min(size, num_remaining), emitted=emitted)
    return _price(trace, step, costs, batch_size=batch_size, is_watched=is_watched)


def _price(
    trace: Trace, step: SimulatedStep, costs: StepCosts | None, *, batch_size: int, is_watched: bool
) -> SimulatedStep:
    if costs is None:
        return step
    draft = costs.draft_ms(step.block_size, batch_size) if step.block_size > 1 else 0.0
    verify = costs.verify_ms(step.verify_size, batch_size, trace.num_prompt_tokens + step.anchor)
    overhead = getattr(costs, "overhead_ms", 0.0) if is_watched else 0.0  # nearly all of it is the drafter's look
    return replace(step, milliseconds=draft + verify + overhead)


def _plain_step(anchor: int) -> SimulatedStep:
    return SimulatedStep(anchor=anchor, block_size=1, verify_size=1, emitted=1)


def _inputs(trace: Trace, steps: list[SimulatedStep], anchor: int, batch_size: int) -> PilotInputs:
    """The values that `Sequence.pilot_inputs` gives when the answer ends with this anchor."""
    return PilotInputs(
        num_steps=len(steps),
        context_length=trace.num_prompt_tokens + anchor,
        batch_size=batch_size,
        num_remaining=trace.max_new_tokens - anchor - 1,
        max_block_size=trace.setting.max_block_size,
        trained_block_size=trace.setting.trained_block_size,
        temperature=trace.temperature,
        last_emitted=steps[-1].emitted if steps else 0,
    )


def _step(trace: Trace, pilot: Pilot, inputs: PilotInputs, anchor: int) -> SimulatedStep:
    size = min(pilot.choose(inputs), inputs.max_block_size) if inputs.num_remaining > 1 else 1
    if size <= 1:
        return _plain_step(anchor)
    tree = pilot.select_tree(inputs, trace.candidates(size, anchor, pilot.num_candidates), ABSENT)
    true_ranks = [*trace.draft(size).true_ranks[anchor].tolist(), ABSENT]  # nothing is drafted below the last depth
    accepted = accept(tree, [true_ranks[min(depth, size - 1)] for depth in tree.depths])
    emitted = min(len(accepted.emitted_ids), trace.num_anchors - anchor)
    return SimulatedStep(anchor=anchor, block_size=size, verify_size=len(tree), emitted=emitted)
