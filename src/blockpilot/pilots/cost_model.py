"""What a step costs, in milliseconds: measured points, made monotone and continued between and beyond them.

A speculative step takes draft + verify + overhead; `verify_ms(1)` is a plain step. What a pass costs depends on the
tokens of all requests together, on how many requests they belong to, and on the context that each must look at:

    ms = curve of the batch size (total tokens) + (per_request * batch size + per_token * total tokens) * context

Each curve is the isotonic fit of its measured points (more tokens never cost less), straight between them and beyond.
Between measured batch sizes curves are mixed linearly. Where a pass is padded to the next of some sizes, costs rise in
steps. `StepCosts.linear` makes the same object for a load that is only imagined.

A pilot compares steps that check 0 .. N nodes, before or after a draft, and comes back at every step. Their
milliseconds depend on batch size and context length alone, and on most machines not even on the context: `StepTables`
makes the rows once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NotRequired, Protocol, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.core.reading import convert
from blockpilot.pilots.growth import smallest_rises

MAX_TABLES = 64  # kept at once; requests of one batch may differ in context
_MAX_POINTS = 2048
_LEAST_MS = 1e-6  # of a pass of the target: pilots divide by what steps cost
Values = NDArray[np.float64]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


@dataclass(frozen=True)
class CostPoint:
    """The median time of one kind of pass."""

    tokens: Size  # per request: the block size of a draft; anchor and nodes of a verify
    ms: Milliseconds
    batch_size: Size = 1
    context_length: Annotated[int, msgspec.Meta(ge=0, le=2**30)] = 0
    spread: Milliseconds = 0.0  # half the interquartile range of the repeats, over their median

    @property
    def total(self) -> int:
        return self.tokens * self.batch_size


_Points = Annotated[tuple[CostPoint, ...], msgspec.Meta(max_length=_MAX_POINTS)]


class _StoredCosts(TypedDict):
    """`StepCosts` as they stand in a file."""

    draft: _Points
    verify: _Points
    overhead_ms: Milliseconds
    key: dict[str, str | int | float | bool | None]
    padding: NotRequired[Annotated[tuple[Size, ...], msgspec.Meta(max_length=_MAX_POINTS)]]


@dataclass(frozen=True)
class FitError:
    """How far to trust the table, as shares of the milliseconds."""

    leave_one_out: float  # mean over inner points, each predicted from the others
    worst: float  # the largest of these
    spread: float  # mean spread of repeated measures


class _CostSurface:
    """Milliseconds over tokens per request, batch size and context length."""

    def __init__(self, points: Sequence[CostPoint], least: float = 0.0) -> None:
        self.least = least
        self.per_request, self.per_token = _context_slopes(points)
        self.curves = {
            size: _Curve(
                [point.total for point in points if point.batch_size == size],
                [max(point.ms - self._context_ms(point), 0.0) for point in points if point.batch_size == size],
            )
            for size in sorted({point.batch_size for point in points})
        }
        self.depends_on_context = bool(self.per_request or self.per_token)
        self._rows: dict[int, Values] = {}

    def row(self, num_tokens: int, batch_size: int, context_length: int) -> Values:
        """Milliseconds [num_tokens] of 1 .. num_tokens tokens per request; do not write into it."""
        base = self._base_row(num_tokens, batch_size)[:num_tokens]
        if not self.depends_on_context:
            return base
        slopes: Values = self.per_request + self.per_token * np.arange(1.0, num_tokens + 1)  # ms per context token
        return base + batch_size * context_length * slopes

    def at(self, tokens: int, batch_size: int, context_length: int) -> float:
        return float(self.row(tokens, batch_size, context_length)[-1])

    def _context_ms(self, point: CostPoint) -> float:
        return point.context_length * (self.per_request * point.batch_size + self.per_token * point.total)

    def _base_row(self, num_tokens: int, batch_size: int) -> Values:
        """Context apart, and at least as long as asked for: pilots come back at every step."""
        row = self._rows.get(batch_size)
        if row is None or len(row) < num_tokens:
            totals = batch_size * np.arange(1.0, max(num_tokens, MAX_TREE_NODES + 1) + 1)
            row = self._rows[batch_size] = np.maximum(self._mix(totals, batch_size), self.least)
        return row

    def _mix(self, totals: Values, batch_size: int) -> Values:
        if not self.curves:
            return np.zeros_like(totals)
        sizes = list(self.curves)
        below = max((size for size in sizes if size <= batch_size), default=sizes[0])
        above = min((size for size in sizes if size >= batch_size), default=sizes[-1])
        low = self.curves[below](totals)
        if above == below:
            return low
        high, last = self.curves[above](totals), self.curves[below].x[-1:]
        more = self.curves[below](last) + high - self.curves[above](last)
        low = np.where(totals > last, np.maximum(low, more), low)  # beyond what was measured, as in the larger batch
        high = np.maximum(high, low)
        return low + (high - low) * (batch_size - below) / (above - below)


class _Curve:
    """An increasing line through measured points."""

    def __init__(self, totals: Sequence[float], ms: Sequence[float]) -> None:
        self.x, places = np.unique(np.array(totals, dtype=np.float64), return_inverse=True)
        counts = np.bincount(places)
        self.measured: Values = np.bincount(places, weights=ms) / counts
        self.y = _isotonic(self.measured, counts)
        first, last = min(1, len(self.x) - 1), max(len(self.x) - 3, 0)  # two segments: one may be a plateau of noise
        self.slope_below = _slope(self.x, self.y, 0, first)
        self.slope_above = _slope(self.x, self.y, last, len(self.x) - 1)

    def __call__(self, totals: Values) -> Values:
        inner = np.interp(totals, self.x, self.y)
        beyond = self.slope_above * np.maximum(totals - self.x[-1], 0)
        before = self.slope_below * np.maximum(self.x[0] - totals, 0)
        result: Values = np.maximum(inner + beyond - before, 0)
        return result

    def leave_one_out(self) -> list[float]:
        """The relative error at every inner point when the curve is fitted to the others."""
        errors = []
        for index in range(1, len(self.x) - 1):
            others = _Curve(np.delete(self.x, index).tolist(), np.delete(self.measured, index).tolist())
            guess = float(others(self.x[index : index + 1])[0])
            errors.append(abs(guess - self.measured[index]) / max(self.measured[index], 1e-9))
        return errors


class CostSource(Protocol):
    """Costs that stay as they are, or that follow the machine (`pilots/live_costs.py`)."""

    @property
    def current(self) -> "StepCosts": ...

    @property
    def version(self) -> int:
        """Another one wherever `current` is another one."""


@dataclass(frozen=True)
class StepCosts:
    version: ClassVar[int] = 0

    draft: tuple[CostPoint, ...] = ()
    verify: tuple[CostPoint, ...] = ()
    overhead_ms: float = 0.0  # the rest of a step: committing tokens, and the drafter reading what was accepted
    key: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of what, and where it was measured
    padding: tuple[int, ...] = ()  # sizes that the tokens of a verify are padded to; empty: no padding

    def __post_init__(self) -> None:
        points = (*self.draft, *self.verify)
        numbers = [self.overhead_ms, *(point.ms for point in points)]
        if not self.verify or not all(np.isfinite(number) and number >= 0 for number in numbers):
            raise InputError("step costs need at least one verify point, and milliseconds that are not negative")
        if any(min(point.tokens, point.batch_size) < 1 or point.context_length < 0 for point in points):
            raise InputError("step costs: a point needs at least one token and one request")
        if any(size >= larger for size, larger in pairwise(self.padding)):
            raise InputError("step costs: sizes that passes are padded to must rise")

    @classmethod
    def linear(cls, draft: float = 0.15, fixed: float = 1.0, slope: float = 0.02) -> "StepCosts":
        """An imagined load: draft + fixed + slope * drafted tokens checked. With fixed = 1 the unit is a plain step."""
        return cls((CostPoint(2, draft),), (CostPoint(1, fixed), CostPoint(2, fixed + slope)))

    @property
    def current(self) -> "StepCosts":
        return self

    @property
    def depends_on_context(self) -> bool:
        """Whether checking takes longer behind a longer context. False also where one context alone was measured."""
        return self._verify.depends_on_context

    @property
    def max_batch_size(self) -> int:
        """The largest batch that was measured."""
        return max(point.batch_size for point in self.verify)

    def draft_ms(self, block_size: int, batch_size: int = 1) -> float:
        return self._draft.at(block_size, batch_size, 0) if block_size > 1 else 0.0

    def verify_ms(self, tokens: int, batch_size: int = 1, context_length: int = 256) -> float:
        """A target pass over `tokens` per request, the anchor among them."""
        return self._verify.at(self._padded(tokens), batch_size, context_length)

    def verify_row(self, num_tokens: int, batch_size: int = 1, context_length: int = 256) -> Values:
        """`verify_ms` [num_tokens] of 1 .. num_tokens tokens."""
        row = self._verify.row(self._padded(num_tokens), batch_size, context_length)
        if not self.padding:
            return row
        padded: Values = row[self._padded_places[:num_tokens]]
        return padded

    def _padded(self, tokens: int) -> int:
        return next((size for size in self.padding if size >= tokens), tokens)

    def step_ms(self, block_size: int, tokens: int, batch_size: int = 1, context_length: int = 256) -> float:
        """A whole step. One that does not draft (block size 0 or 1) is the check alone."""
        passes = self.draft_ms(block_size, batch_size) + self.verify_ms(tokens, batch_size, context_length)
        return passes + (self.overhead_ms if block_size > 1 else 0.0)

    @cached_property
    def fit_error(self) -> FitError:
        curves = [*self._draft.curves.values(), *self._verify.curves.values()]
        errors = [error for curve in curves for error in curve.leave_one_out()]
        spreads = [point.spread for point in (*self.draft, *self.verify)]
        return FitError(float(np.mean(errors or [0.0])), float(max(errors, default=0.0)), float(np.mean(spreads)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StepCosts":
        """Of a file that `to_dict` has filled."""
        if unknown := set(values) - set(cls.__dataclass_fields__):
            raise InputError(f"step costs: unknown field {sorted(unknown)[0]!r:.40}")
        stored: _StoredCosts = convert(dict(values), _StoredCosts, "these are no step costs")
        return cls(**stored)

    @cached_property
    def _padded_places(self) -> NDArray[np.int64]:
        """Where in a row the cost of 1, 2, .. tokens stands, as many as a tree may have."""
        return np.array([self._padded(tokens) - 1 for tokens in range(1, MAX_TREE_NODES + 2)])

    @cached_property
    def _draft(self) -> _CostSurface:
        return _CostSurface(self.draft)

    @cached_property
    def _verify(self) -> _CostSurface:
        return _CostSurface(self.verify, _LEAST_MS)


@dataclass(frozen=True, eq=False)
class StepTable:
    """Steps of one batch size and context, if every request of the batch checks as many nodes."""

    costs: StepCosts
    batch_size: int
    check_ms: list[float]  # [nodes + 1], of a step that does not draft
    rest_ms: Values  # [nodes + 1], of one that does, without its draft
    step_ms: Values  # [sizes, nodes + 1], for every draft size that a pilot may choose
    plain_ms: float
    _growth: dict[int, tuple[Values, Values]] = field(default_factory=dict, init=False, repr=False)

    def growth(self, draft_size: int) -> tuple[Values, Values]:
        """For any draft size: milliseconds [nodes + 1], and the smallest rise [nodes] from each number of nodes on."""
        found = self._growth.get(draft_size)
        if found is None:
            step_ms = self.costs.draft_ms(draft_size, self.batch_size) + self.rest_ms
            found = self._growth[draft_size] = step_ms, smallest_rises(step_ms)
        return found


class StepTables:
    """The tables that one pilot has needed, shared by all its requests."""

    def __init__(self, source: CostSource, draft_sizes: Sequence[int], num_nodes: int) -> None:
        self.source, self.draft_sizes, self.num_nodes = source, draft_sizes, num_nodes
        self._begin()

    def at(self, batch_size: int, context_length: int, buckets: tuple[int, ...] = ()) -> StepTable:
        """`buckets` are the sizes that the engine pads checks to, whatever engine the costs were measured with."""
        if self.source.version != self._version:
            self._begin()
        return self._make(batch_size, context_length if self._depends_on_context else 0, buckets)

    def _begin(self) -> None:
        self._version, self.costs = self.source.version, self.source.current
        self._depends_on_context = self.costs.depends_on_context
        self._make = lru_cache(MAX_TABLES)(self._make_table)
        self._pad = lru_cache(lambda buckets: replace(self.costs, padding=buckets))  # curves are fitted once

    def _make_table(self, batch_size: int, context_length: int, buckets: tuple[int, ...]) -> StepTable:
        costs = self.costs if self.costs.padding == buckets else self._pad(buckets)
        checks = costs.verify_row(self.num_nodes + 1, batch_size, context_length)
        rest_ms = checks + costs.overhead_ms
        drafts = np.array([costs.draft_ms(size, batch_size) for size in self.draft_sizes])
        return StepTable(costs, batch_size, checks.tolist(), rest_ms, drafts[:, None] + rest_ms, float(checks[0]))


def _isotonic(values: Values, weights: Iterable[float]) -> Values:
    """The increasing sequence nearest to `values`: neighbours in the wrong order are replaced by their mean."""
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, how many)
    for value, weight in zip(values.tolist(), weights, strict=True):
        mean, total, count = value, float(weight), 1
        while blocks and blocks[-1][0] > mean:
            before, other, size = blocks.pop()
            mean = (before * other + mean * total) / (other + total)
            total, count = total + other, count + size
        blocks.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


def _slope(x: Values, y: Values, start: int, end: int) -> float:
    return float((y[end] - y[start]) / (x[end] - x[start])) if end > start else 0.0


def _context_slopes(points: Sequence[CostPoint]) -> tuple[float, float]:
    """Milliseconds per context token of (each request, each token), from points that differ in context alone."""
    rows, targets = [], []
    groups: dict[tuple[int, int], list[CostPoint]] = {}
    for point in points:
        groups.setdefault((point.batch_size, point.total), []).append(point)
    for size, total in set(groups):
        group = groups[size, total]
        mean_context = np.mean([point.context_length for point in group])
        mean_ms = np.mean([point.ms for point in group])
        for point in group:
            rows.append(np.array([size, total]) * (point.context_length - mean_context))
            targets.append(point.ms - mean_ms)
    matrix, target = np.array(rows).reshape(-1, 2), np.array(targets)
    if not matrix.any():
        return 0.0, 0.0
    both = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    alone = [max(float(column @ target) / max(float(column @ column), 1e-12), 0.0) for column in matrix.T]
    errors = [float(((matrix[:, i] * alone[i] - target) ** 2).sum()) for i in range(2)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
