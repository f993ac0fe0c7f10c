"""Step costs laid out for a pilot that comes back at every step.

A decision before or after a draft compares steps that check 0 .. N nodes. Their milliseconds depend on batch size and
context length alone, and on most machines not even on the context: the rows are made once and looked up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from blockpilot.pilots.cost_model import StepCosts, Values
from blockpilot.pilots.growth import smallest_rises

MAX_TABLES = 64  # kept at once; requests of one batch may differ in context


@dataclass(frozen=True, eq=False)
class StepTable:
    """Steps of one batch size and context, if every request of the batch checks as many nodes."""

    costs: StepCosts
    batch_size: int
    rest_ms: Values  # [nodes + 1], a step without its draft
    step_ms: Values  # [sizes, nodes + 1], for every draft size that a pilot may choose
    _growth: dict[int, tuple[Values, Values]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def plain_ms(self) -> float:
        """A step that checks the anchor alone."""
        return float(self.rest_ms[0])

    def growth(self, draft_size: int) -> tuple[Values, Values]:
        """For any draft size: milliseconds [nodes + 1], and the smallest rise [nodes] from each number of nodes on."""
        found = self._growth.get(draft_size)
        if found is None:
            step_ms = self.costs.draft_ms(draft_size, self.batch_size) + self.rest_ms
            found = self._growth[draft_size] = step_ms, smallest_rises(step_ms)
        return found


class StepTables:
    """The tables that one pilot has needed, shared by all its requests."""

    def __init__(self, costs: StepCosts, draft_sizes: Sequence[int], num_nodes: int) -> None:
        self.costs, self.draft_sizes, self.num_nodes = costs, draft_sizes, num_nodes
        self.depends_on_context = costs.depends_on_context
        self._tables: dict[tuple[int, int, tuple[int, ...]], StepTable] = {}

    def at(self, batch_size: int, context_length: int, buckets: tuple[int, ...] = ()) -> StepTable:
        """`buckets` are the sizes that the engine pads checks to, whatever engine the costs were measured with."""
        key = (batch_size, context_length if self.depends_on_context else 0, buckets)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            found = self._tables[key] = self._make(batch_size, context_length, buckets)
        return found

    def _make(self, batch_size: int, context_length: int, buckets: tuple[int, ...]) -> StepTable:
        costs = self.costs if self.costs.padding == buckets else replace(self.costs, padding=buckets)
        rest_ms = costs.verify_row(self.num_nodes + 1, batch_size, context_length) + costs.overhead_ms
        drafts = np.array([costs.draft_ms(size, batch_size) for size in self.draft_sizes])
        return StepTable(costs, batch_size, rest_ms, drafts[:, None] + rest_ms)
