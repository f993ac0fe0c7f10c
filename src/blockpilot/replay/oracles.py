"""The best that choosing block sizes can do, known only afterwards: per request and per step."""

from collections.abc import Sequence

from blockpilot.core.errors import InputError
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.simulate import SimulatedStep, chain_step, total, walk_chain
from blockpilot.replay.traces import Trace


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
    walk, anchor = [], 0
    while anchor < trace.num_anchors:
        walk.append(best[anchor])
        anchor += best[anchor].emitted
    plain = walk_chain(trace, 1, costs)
    return plain if total([plain]).milliseconds < total([walk]).milliseconds else walk
