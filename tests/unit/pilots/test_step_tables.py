"""Step costs as pilots look them up, against the costs themselves."""

from dataclasses import replace

import numpy as np
import pytest

from blockpilot.pilots.cost_model import MAX_TABLES, CostPoint, StepCosts, StepTables
from blockpilot.pilots.growth import smallest_rises

DRAFT = (CostPoint(4, 2.0), CostPoint(16, 3.0), CostPoint(16, 5.0, batch_size=4))
ONE_CONTEXT = StepCosts(DRAFT, (CostPoint(1, 10.0), CostPoint(8, 12.0), CostPoint(64, 40.0)), overhead_ms=0.5)
CONTEXTS = StepCosts(
    DRAFT, tuple(CostPoint(n, 10 + n + c * (0.01 + 0.001 * n), context_length=c) for n in (1, 8, 64) for c in (64, 512))
)


@pytest.mark.parametrize("costs", [ONE_CONTEXT, CONTEXTS])
@pytest.mark.parametrize(("batch_size", "context_length"), [(1, 64), (4, 300)])
def test_a_table_holds_whole_steps(costs: StepCosts, batch_size: int, context_length: int) -> None:
    table = StepTables(costs, (4, 8), 20).at(batch_size, context_length)
    for row, size in enumerate((4, 8)):
        whole = [costs.step_ms(size, n + 1, batch_size, context_length) for n in range(21)]
        np.testing.assert_allclose(table.step_ms[row], whole)
    step_ms, rises = table.growth(11)
    np.testing.assert_allclose(step_ms, [costs.step_ms(11, n + 1, batch_size, context_length) for n in range(21)])
    assert rises.tolist() == smallest_rises(step_ms).tolist()


def test_tables_are_made_once_and_not_kept_without_end() -> None:
    assert (ONE_CONTEXT.depends_on_context, CONTEXTS.depends_on_context) == (False, True)
    tables = StepTables(ONE_CONTEXT, (4,), 20)
    assert tables.at(1, 64) is tables.at(1, 65) is not tables.at(2, 64)
    tables = StepTables(CONTEXTS, (4,), 20)
    assert tables.at(1, 64) is tables.at(1, 64) is not tables.at(1, 65)
    for context_length in range(3 * MAX_TABLES):
        tables.at(1, context_length)
    assert tables._make.cache_info().currsize <= MAX_TABLES


@pytest.mark.parametrize("padding", [(), (1, 64)])
def test_checks_cost_what_the_engines_buckets_make_of_them(padding: tuple[int, ...]) -> None:
    tables = StepTables(replace(ONE_CONTEXT, padding=padding), (4,), 20)
    as_they_are, padded = tables.at(2, 64), tables.at(2, 64, (1, 8, 32))
    whole = replace(ONE_CONTEXT, padding=(1, 8, 32))
    np.testing.assert_allclose(as_they_are.step_ms[0], [ONE_CONTEXT.step_ms(4, n + 1, 2, 64) for n in range(21)])
    np.testing.assert_allclose(padded.step_ms[0], [whole.step_ms(4, n + 1, 2, 64) for n in range(21)])
    assert padded.step_ms[0, 1] == padded.step_ms[0, 7] < padded.step_ms[0, 8]
