"""Machine code and Python decide the same, and Numba is not needed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.core.candidates import Candidates
from blockpilot.pilots import switch
from blockpilot.pilots.calibration import FEATURES, IDENTITY, Calibration
from blockpilot.pilots.cost_model import CostPoint, StepCosts
from blockpilot.pilots.fixed import TreePilot
from blockpilot.pilots.forecast import MAX_AVERAGE, Forecast, Recent
from blockpilot.pilots.growth import grow_calibrated, grow_chain, grow_tree, smallest_rises
from blockpilot.pilots.step import StepPilot
from tests.unit.pilots.pieces import log_softmax, make_inputs, random_candidates

needs_numba = pytest.mark.skipif(switch.load_compiled() is None, reason="Numba is not installed")
SEEDS = st.integers(0, 2**32 - 1)


@contextmanager
def without_numba() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "load_compiled", lambda: None)
        yield


@st.composite
def drafts(draw: st.DrawFn) -> Candidates:
    """Drafts of all shapes. Every third has scores of few values: exact ties between siblings and between paths."""
    depth, width, seed = draw(st.integers(1, 31)), draw(st.integers(1, 16)), draw(SEEDS)
    is_pairwise, is_tied = draw(st.booleans()), draw(st.sampled_from([True, False, False]))
    random = np.random.default_rng(seed)

    def scores(*shape: int) -> np.ndarray:
        if is_tied:
            return np.log(random.choice(np.array([0.5, 0.25, 0.125], dtype=np.float32), size=shape))
        return log_softmax(random.normal(size=shape) * 2)

    ids = random.integers(0, 150_000, size=(depth, width))
    if not is_pairwise:
        return Candidates(ids, scores(depth, width))
    return Candidates(ids, scores(depth, width), scores(width), scores(depth - 1, width, width))


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    if draw(st.booleans()):
        return Calibration.identity()
    random = np.random.default_rng(draw(SEEDS))
    noise = random.normal(size=(draw(st.integers(1, 20)), len(FEATURES))) * 0.3
    return Calibration((np.array(IDENTITY) + noise).astype(np.float32))


@st.composite
def growth_costs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rising in stairs, with plateaus."""
    random, count = np.random.default_rng(draw(SEEDS)), draw(st.sampled_from([1, 7, 63]))
    rises = random.choice([0.0, 0.003, 0.02, 0.3], size=count) * random.random(count)
    step_ms = 1 + np.concatenate([[0], rises.cumsum()])
    return step_ms, smallest_rises(step_ms)


@needs_numba
@settings(max_examples=150, deadline=None)
@given(drafts(), calibrations(), growth_costs(), st.floats(0.05, 1.5), st.integers(0, 31), st.booleans())
def test_the_same_nodes_are_worth_their_cost(candidates, calibration, costs, trust, depth, is_chain) -> None:
    depth = min(depth, candidates.num_positions)
    options = {"trust": trust, "depth": depth, "width": 16, "is_chain": is_chain}
    growth, head = grow_calibrated(candidates, calibration, costs, **options)
    with without_numba():
        plain, plain_head = grow_calibrated(candidates, calibration, costs, **options)
    np.testing.assert_allclose(head, plain_head, rtol=1e-5)
    assert growth.promised == pytest.approx(plain.promised, rel=1e-5, abs=1e-12)
    if growth.nodes != plain.nodes:  # roundings of logarithms may part what is equal but for them
        assert_nearly_as_good(growth, plain, costs[0], trust)
    else:
        assert growth.depth == plain.depth


def assert_nearly_as_good(growth, plain, step_ms, trust) -> None:
    rates = [(1 + trust * one.promised) / step_ms[len(one.nodes)] for one in (growth, plain)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


@needs_numba
@settings(max_examples=100, deadline=None)
@given(drafts(), st.sampled_from([1, 2, 15, 63, 128]))
def test_the_same_nodes_are_likeliest(candidates, num_nodes) -> None:
    nodes = grow_tree(candidates, num_nodes)
    with without_numba():
        plain = grow_tree(candidates, num_nodes)
    assert nodes == plain


@needs_numba
@settings(max_examples=100, deadline=None)
@given(drafts(), st.integers(0, 40))
def test_the_same_chain_is_likeliest(candidates, max_nodes) -> None:
    nodes = grow_chain(candidates, max_nodes)
    with without_numba():
        assert nodes == grow_chain(candidates, max_nodes)


@needs_numba
@settings(max_examples=150, deadline=None)
@given(
    SEEDS,
    st.booleans(),
    st.booleans(),
    st.tuples(st.floats(1, MAX_AVERAGE), st.floats(0, 16), st.floats(1, 20), st.booleans()),
    st.integers(1, 3),
    st.integers(2, 100),
    st.floats(0.3, 1.5),
)
def test_the_same_draft_size_is_chosen(seed, is_fitted, is_chain, remembered, count, num_remaining, scale) -> None:
    random = np.random.default_rng(seed)
    weights = (random.normal(size=(3, 3, 63, 5)) * [0.5, 0.2, 0.2, 0.2, 0.5]).astype(np.float32)
    forecast = Forecast((4, 8, 16), is_chain, weights=weights if is_fitted else None)
    step_ms = 1 + random.choice([0.0, 0.01, 0.2], size=(3, 64)).cumsum(axis=-1)
    given = (Recent(*remembered), step_ms, count, num_remaining)
    best, rate = forecast.best_size(*given)
    with without_numba():
        assert (best, pytest.approx(rate, rel=1e-9)) == forecast.best_size(*given)
    together = forecast.best_check(*given[:-1], scale)
    with without_numba():
        expected = forecast.best_check(*given[:-1], scale)
        assert (*expected[:2], pytest.approx(expected[2], rel=1e-9)) == together


STAIRS = StepCosts(
    (CostPoint(4, 0.2), CostPoint(16, 0.3)),
    tuple(CostPoint(n, 1 + 0.2 * (n > 8) + 0.5 * (n > 32)) for n in range(1, 65)),
)


def walk(pilot, num_steps: int = 60) -> list[object]:
    """Sizes and nodes of a request whose drafts come true at times."""
    random, pilot, emitted, decisions = np.random.default_rng(1), pilot.start(None), 0, []
    for number in range(num_steps):
        inputs = make_inputs(
            last_emitted=emitted, num_remaining=num_steps - number + 1, temperature=float(number % 3 == 0)
        )
        size = pilot.choose(inputs)
        nodes = []
        if size > 1:
            drawn = random_candidates(number, depth=size - 1, width=8, is_pairwise=number % 2 == 0)
            nodes = pilot.select(inputs, drawn)
        emitted = 1 + int(random.integers(0, 4)) * bool(nodes)
        decisions.append((size, nodes))
    return decisions


@pytest.mark.parametrize("how", ["absent", "unusable"])
def test_numba_that_cannot_be_used_is_not_needed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "absent":
        monkeypatch.setattr(switch, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(switch, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "blockpilot.pilots.compiled", None)  # importing it fails
    switch.load_compiled.cache_clear()
    try:
        assert switch.load_compiled() is None
        assert TreePilot(3).select(make_inputs(), random_candidates(0, depth=7, width=8))
    finally:
        switch.load_compiled.cache_clear()


@pytest.mark.parametrize("kind", ["step", "chain-step", "tree"])
def test_without_numba_pilots_work_and_decide_the_same(kind: str) -> None:
    def make():
        if kind == "tree":
            return TreePilot(20)
        sampled = Calibration(np.array([[-0.3, 0.8, 0.1, -0.1, -0.2, 0.1]], dtype=np.float32))
        return StepPilot(Calibration.identity(), STAIRS, is_chain=kind == "chain-step", sampled=sampled)

    with without_numba():
        plain = walk(make())
    assert any(nodes for _, nodes in plain)
    assert walk(make()) == plain


@needs_numba
def test_arrays_of_other_forms_are_copied() -> None:
    candidates = random_candidates(0, depth=7, width=8)
    assert candidates.first is not None and candidates.pairwise is not None
    ids = np.broadcast_to(np.arange(8), (7, 8))
    plain = Candidates(ids.copy(), candidates.log_probs, candidates.first, candidates.pairwise)
    frozen = candidates.log_probs.copy()
    frozen.flags.writeable = False
    other = Candidates(
        ids.astype(np.int32), frozen, candidates.first.astype(np.float64), np.asfortranarray(candidates.pairwise)
    )
    assert grow_tree(other, 30) == grow_tree(plain, 30)


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_numba_is_not_loaded_before_a_pilot_needs_it() -> None:
    code = (
        "import sys; from blockpilot.pilots.registry import load_pilot\nload_pilot('ar'); print('numba' in sys.modules)"
    )
    assert run_python(code, PYTHONPATH="src").strip() == "False"


@needs_numba
def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch) -> None:
    from numba import int64
    from numba.core.caching import CacheImpl

    from blockpilot.pilots.compiled.jit import compiled

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # as if no folder could be written to
    assert compiled(int64)(lambda number: number + 1)(2) == 3
