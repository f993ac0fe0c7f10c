"""Step costs that follow the machine.

A profile is measured in a second or two, perhaps while the machine did something else; later the machine is busier, or
hotter, or batches grow beyond what was measured. Decoding itself measures every step. `LiveCosts` compares each with
what the profile says, keeps the ratio by the number of tokens of the pass (in octaves, separately for drafts and
checks), and gives out the profile's points times these ratios. What was never seen follows its neighbours, and the
profile where there are none.

Costs decide how far to draft, never what is emitted. Replay and tests use costs that stay as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from blockpilot.pilots.cost_model import CostPoint, StepCosts

REFRESH = 32  # steps that are weighed together; then pilots are told if need be, which takes half a millisecond
CHANGE = 0.03  # that is worth telling
_NUM_OCTAVES = 13
_MEMORY = 24.0  # passes that an octave remembers
_PRIOR = 0.25  # passes that the profile counts for, beside an octave's neighbours
_FALL = 0.25  # what an octave's passes count for in the next one
_OUTLIER = 0.4  # a single pass moves an octave by no more than that, in logarithms: others run on the machine, too


class MeasuredStep(NamedTuple):
    """A step of as many requests as there are check sizes; draft sizes of those that drafted."""

    draft_sizes: Sequence[int]
    check_sizes: Sequence[int]
    context_length: int
    draft_ms: float
    check_ms: float


@dataclass
class _Ratios:
    """Measured over expected milliseconds, as logarithms by octave."""

    means: list[float] = field(default_factory=lambda: [0.0] * _NUM_OCTAVES)
    counts: list[float] = field(default_factory=lambda: [0.0] * _NUM_OCTAVES)

    def note(self, num_tokens: int, ratio: float) -> None:
        octave = _octave(num_tokens)
        count = self.counts[octave] = min(self.counts[octave] + 1, _MEMORY)
        off = math.log(ratio) - self.means[octave]
        if count > 2:
            off = min(max(off, -_OUTLIER), _OUTLIER)
        self.means[octave] += off / count

    def at(self, num_tokens: int) -> float:
        place, weight, total = math.log2(num_tokens), _PRIOR, 0.0
        for octave, count in enumerate(self.counts):
            if count:
                share = count * _FALL ** abs(octave - place)
                weight, total = weight + share, total + share * self.means[octave]
        return math.exp(total / weight)


class LiveCosts:
    """`current` is what pilots weigh steps by; `version` changes with it."""

    def __init__(self, profile: StepCosts) -> None:
        self.profile = self.current = profile
        self.version = 0
        self._drafts, self._checks = _Ratios(), _Ratios()
        self._noted: list[MeasuredStep] = []  # looked at together: between two passes little time should go by
        self._draft_ms, self._check_ms = lru_cache(profile.draft_ms), lru_cache(profile.verify_ms)

    def note(self, step: MeasuredStep) -> None:
        self._noted.append(step)
        if len(self._noted) == REFRESH:
            for one in self._noted:
                self._weigh(one)
            self._noted.clear()
            self._refresh()

    def _weigh(self, step: MeasuredStep) -> None:
        total, count = sum(step.check_sizes), len(step.check_sizes)
        context_length = step.context_length if self.profile.depends_on_context else 0
        expected = self._check_ms(-(-total // count), count, context_length)
        if step.check_ms > 0 and expected > 0:
            self._checks.note(total, step.check_ms / expected)
        if step.draft_sizes and step.draft_ms > 0:
            largest, count = max(step.draft_sizes), len(step.draft_sizes)
            expected = self._draft_ms(largest, count)
            if expected > 0:
                self._drafts.note(largest * count, step.draft_ms / expected)

    def _refresh(self) -> None:
        draft, verify = _scaled(self.profile.draft, self._drafts), _scaled(self.profile.verify, self._checks)
        if _differ(draft, self.current.draft) or _differ(verify, self.current.verify):
            self.current = replace(self.current, draft=draft, verify=verify)
            self.version += 1


def _octave(num_tokens: int) -> int:
    return min(round(math.log2(num_tokens)), _NUM_OCTAVES - 1)


def _scaled(points: Sequence[CostPoint], ratios: _Ratios) -> tuple[CostPoint, ...]:
    return tuple(replace(point, ms=point.ms * ratios.at(point.total)) for point in points)


def _differ(points: Sequence[CostPoint], others: Sequence[CostPoint]) -> bool:
    return any(abs(one.ms - other.ms) > CHANGE * other.ms for one, other in zip(points, others, strict=True))
