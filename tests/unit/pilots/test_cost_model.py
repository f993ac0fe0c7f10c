"""Step costs out of measured points."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.errors import InputError
from blockpilot.pilots.cost_model import CostPoint, StepCosts

points = st.builds(
    CostPoint,
    tokens=st.integers(1, 64),
    ms=st.floats(0.01, 500),
    batch_size=st.sampled_from([1, 2, 8]),
    context_length=st.sampled_from([64, 256, 1024]),
)


@given(st.lists(points, min_size=1, max_size=20))
def test_more_work_never_costs_less(measured: list[CostPoint]) -> None:
    costs = StepCosts(verify=tuple(measured), draft=tuple(measured[:3]))
    for batch_size in (1, 3, 8, 20):
        for context in (0, 256, 5000):
            row = costs.verify_row(80, batch_size, context)
            assert np.isfinite(row).all() and (row >= 0).all()
            assert (np.diff(row) >= -1e-6 * row.max() - 1e-9).all()
            assert costs.verify_ms(17, batch_size, context) == pytest.approx(row[16])
        assert costs.verify_ms(5, batch_size, 900) >= costs.verify_ms(5, batch_size, 100) - 1e-9
        drafts = [costs.draft_ms(size, batch_size) for size in range(2, 40)]
        assert drafts == sorted(drafts)


def test_measured_points_are_met_and_the_last_slope_goes_on() -> None:
    costs = StepCosts(verify=tuple(CostPoint(n, ms) for n, ms in ((1, 20.0), (2, 28.0), (4, 28.0), (8, 44.0))))
    assert [costs.verify_ms(n) for n in (1, 2, 3, 4, 6, 8)] == [20, 28, 28, 28, 36, 44]
    slope = (44 - 28) / (8 - 2)  # over two segments
    assert costs.verify_ms(14) == pytest.approx(44 + 6 * slope)
    assert costs.verify_ms(2, batch_size=2) == 28  # the tokens of all requests count


def test_noise_is_levelled() -> None:
    costs = StepCosts(verify=(CostPoint(1, 10), CostPoint(2, 14), CostPoint(3, 12), CostPoint(4, 20)))
    assert [costs.verify_ms(n) for n in (1, 2, 3, 4)] == [10, 13, 13, 20]


def test_context_and_batch_are_told_apart() -> None:
    def true_ms(total: int, batch_size: int, context: int) -> float:
        return 5 + 0.5 * total + batch_size + context * (0.002 * batch_size + 0.0003 * total)

    measured = [
        CostPoint(total // size, true_ms(total, size, context), size, context)
        for size in (1, 4)
        for total in (4, 8, 16, 32)
        for context in (128, 512, 1024)
    ]
    costs = StepCosts(verify=tuple(measured))
    for tokens, size, context in ((4, 1, 2048), (3, 4, 16), (6, 2, 256), (3, 3, 600), (20, 4, 300)):
        assert costs.verify_ms(tokens, size, context) == pytest.approx(true_ms(tokens * size, size, context), rel=1e-6)
    assert costs.fit_error.leave_one_out < 1e-9


def test_an_imagined_load() -> None:
    costs = StepCosts.linear(draft=0.25, fixed=0.95, slope=0.05)
    assert costs.verify_ms(1) == 0.95
    for size in (2, 8, 16, 64):
        assert costs.step_ms(size, size) == pytest.approx(0.25 + 0.95 + 0.05 * (size - 1))
    assert costs.draft_ms(1) == 0


def test_fit_error_sees_a_bump_and_the_spread_of_repeats() -> None:
    costs = StepCosts(
        verify=(CostPoint(1, 10, spread=0.1), CostPoint(2, 30), CostPoint(3, 30)), draft=(CostPoint(2, 1),)
    )
    assert costs.fit_error.worst == pytest.approx(1 / 3)  # 20 is expected between 10 and 30
    assert costs.fit_error.spread == pytest.approx(0.1 / 4)


def test_round_trip() -> None:
    costs = StepCosts((CostPoint(4, 7.5),), (CostPoint(1, 20.0), CostPoint(2, 21.0, 2, 64, 0.1)), 1.5, {"target": "t"})
    costs = replace(costs, padding=(1, 4, 16))
    again = StepCosts.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert again == costs and again.key == {"target": "t"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"more": 1}, "unknown field 'more'"),
        ({"verify": []}, "at least one verify point"),
        ({"verify": [{"tokens": 1, "ms": -1}]}, r"Expected float >= 0.0, at verify\[0\].ms"),
        ({"verify": [{"tokens": 0, "ms": 1}]}, r"Expected int >= 1, at verify\[0\].tokens"),
        ({"padding": [4, 1]}, "must rise"),
        ({"draft": [{"speed": 1}]}, "these are no step costs"),
        ({"overhead_ms": "x"}, "these are no step costs"),
    ],
)
def test_bad_costs_are_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        StepCosts.from_dict(StepCosts.linear().to_dict() | change)


def test_padded_checks_cost_what_the_next_size_costs() -> None:
    costs = StepCosts((), tuple(CostPoint(n, float(n)) for n in (1, 4, 16)), padding=(1, 4, 16))
    assert costs.verify_row(6).tolist() == [1, 4, 4, 4, 16, 16]
    assert costs.verify_ms(5) == costs.verify_ms(16) and costs.verify_ms(20) == pytest.approx(20)


def test_beyond_what_a_small_batch_was_measured_for_costs_rise_as_in_a_large_one() -> None:
    """One request is timed up to 64 tokens, and those are nearly free; 4 x 64 tokens are not."""
    flat = [CostPoint(tokens, 1.0 + 0.001 * tokens) for tokens in (1, 16, 32, 64)]
    steep = [CostPoint(tokens, 1.0 + 0.4 * tokens, batch_size=64) for tokens in (1, 4, 16)]
    costs = StepCosts(verify=(*flat, *steep))
    assert costs.verify_ms(64) == pytest.approx(1.064)
    assert costs.verify_ms(16, batch_size=4) == pytest.approx(1.064, rel=0.05)  # 64 tokens in all
    rise = costs.verify_ms(64, batch_size=4) - costs.verify_ms(16, batch_size=4)
    assert rise == pytest.approx(3 * 0.4, rel=0.01)  # of 192 more


@pytest.mark.parametrize("points", [((10, 1.0), (20, 100.0)), ((1, 0.0), (2, 0.0))])
def test_a_step_always_costs_something(points: tuple[tuple[int, float], ...]) -> None:
    """Pilots divide by what steps cost, also where a line through odd points falls below zero."""
    costs = StepCosts((), tuple(CostPoint(*point) for point in points))
    assert (costs.verify_row(8) > 0).all() and costs.step_ms(1, 1) > 0


def test_the_largest_profile_is_read_quickly() -> None:
    points = [{"tokens": 1 + n, "ms": 1.0, "batch_size": 1 + n, "context_length": n} for n in range(2048)]
    stored = StepCosts.linear().to_dict()
    assert StepCosts.from_dict(stored | {"verify": points}).verify_ms(4) > 0
    with pytest.raises(InputError, match="Expected array of length <= 2048, at verify"):
        StepCosts.from_dict(stored | {"verify": points * 2})
