"""The arithmetic as machine code and as plain Python: one source, the same results. Numba is not needed."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blockpilot import pilots
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.pilots.calibration import FEATURES, IDENTITY, Calibration
from blockpilot.pilots.fixed import TreePilot
from blockpilot.pilots.forecast import Forecast, load_loops
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_chain, grow_nodes, smallest_rises
from blockpilot.pilots.loops import jit
from blockpilot.pilots.memory import Recent
from tests.unit.pilots.pieces import log_softmax, make_inputs, random_draft, select_one

needs_numba = pytest.mark.skipif(jit.numba is None, reason="Numba is not installed")


@contextmanager
def plain_python() -> Iterator[None]:
    """The loops as they are where Numba is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilots, "loops", pilots.loops)  # importing them anew binds this name
        for name in [name for name in sys.modules if name.startswith("blockpilot.pilots.loops")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "numba", None)
        load_loops.cache_clear()
        try:
            yield
        finally:
            load_loops.cache_clear()


def both_ways(decide: Callable[[], Any]) -> tuple[Any, Any]:
    assert hasattr(load_loops().grow, "signatures"), "machine code"
    compiled = decide()
    with plain_python():
        assert not hasattr(load_loops().grow, "signatures")
        return compiled, decide()


def draw_draft(random: np.random.Generator) -> HostDraft:
    """Of any shape. Every third has scores of few values: exact ties between siblings and between paths."""
    depth, width = int(random.integers(1, 32)), int(random.integers(1, 17))
    is_tied = random.random() < 1 / 3

    def scores(*shape: int) -> np.ndarray:
        if is_tied:
            return np.log(random.choice(np.array([0.5, 0.25, 0.125], dtype=np.float32), size=shape))
        return log_softmax(random.normal(size=shape) * 2)

    ids = random.integers(0, 150_000, size=(depth, width))
    if random.random() < 0.5:
        return Draft(ids, scores(depth, width))
    return Draft(ids, scores(depth, width), scores(width), scores(depth - 1, width, width))


def draw_rules(random: np.random.Generator) -> GrowthRules:
    """Costs rise in stairs, with plateaus, or fall: so many nodes are taken whatever they bring."""
    count = int(random.choice([1, 7, 63]))
    rises = random.choice([0.0, 0.003, 0.02, 0.3], size=count) * random.random(count)
    step_ms = 1 + np.concatenate([[0], rises.cumsum()])
    noise = random.normal(size=(int(random.integers(1, 20)), len(FEATURES))) * 0.3
    fitted = Calibration((np.array(IDENTITY) + noise).astype(np.float32))
    return GrowthRules(
        (step_ms, smallest_rises(step_ms)) if random.random() < 0.7 else falling_costs(count),
        depth=int(random.integers(0, 32)),
        calibration=fitted if random.random() < 0.5 else None,
        trust=float(random.uniform(0.05, 1.5)),
        is_chain=random.random() < 0.3,
    )


@needs_numba
def test_machine_code_and_python_grow_the_same_nodes() -> None:
    random = np.random.default_rng(0)
    cases = [(draw_draft(random), draw_rules(random)) for _ in range(150)]
    compiled, plain = both_ways(lambda: [(grow_nodes(*case), grow_chain(case[0], 9, 12)) for case in cases])
    for (nodes, chain), (expected, expected_chain) in zip(compiled, plain, strict=True):
        assert nodes[:3] == expected[:3] and chain == expected_chain
        for part in ("paths", "head", "promised"):  # exponentials may be rounded differently
            np.testing.assert_allclose(getattr(nodes, part), getattr(expected, part), rtol=1e-5)
    assert sum(len(nodes.parents) > 3 for nodes, _ in compiled) > 50


@needs_numba
def test_machine_code_and_python_forecast_the_same() -> None:
    random = np.random.default_rng(1)

    def draw() -> tuple[Forecast, Recent, np.ndarray, int, int, float]:
        weights = (random.normal(size=(3, 3, 63, 5)) * [0.5, 0.2, 0.2, 0.2, 0.5]).astype(np.float32)
        forecast = Forecast((4, 8, 16), random.random() < 0.5, weights=weights if random.random() < 0.5 else None)
        recent = Recent(random.uniform(1, 32), random.uniform(0, 16), random.uniform(1, 20), random.random() < 0.5)
        step_ms = 1 + random.choice([0.0, 0.01, 0.2], size=(3, 64)).cumsum(axis=-1)
        return forecast, recent, step_ms, int(random.integers(1, 4)), int(random.integers(2, 100)), random.random()

    cases = [draw() for _ in range(60)]

    def decide() -> list[tuple[Any, ...]]:
        return [
            (*forecast.best_size(recent, ms, count, left, scale), *forecast.best_check(recent, ms, count, scale))
            for forecast, recent, ms, count, left, scale in cases
        ]

    compiled, plain = both_ways(decide)
    for found, expected in zip(compiled, plain, strict=True):
        assert (found[0], *found[3:5]) == (expected[0], *expected[3:5])
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    curves = both_ways(lambda: [forecast.expected(recent) for forecast, recent, *_ in cases])
    np.testing.assert_allclose(*curves, rtol=1e-9)


def test_numba_that_cannot_be_used_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    assert jit._find_numba() is None and not caplog.records
    monkeypatch.setattr(jit, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it fails
    with caplog.at_level(logging.WARNING):
        assert jit._find_numba() is None
    assert "decide in Python" in caplog.text
    with plain_python():
        assert len(select_one(TreePilot(3), make_inputs(), random_draft(0)).tree) == 4


@needs_numba
def test_arrays_of_other_forms_are_copied() -> None:
    draft = random_draft(0, depth=7, width=8)
    assert draft.first is not None and draft.pairwise is not None
    ids = np.broadcast_to(np.arange(8), (7, 8))
    plain = Draft(ids.copy(), draft.log_probs, draft.first, draft.pairwise)
    frozen = draft.log_probs.copy()
    frozen.flags.writeable = False
    other = Draft(ids.astype(np.int32), frozen, draft.first.astype(np.float64), np.asfortranarray(draft.pairwise))
    rules = GrowthRules(falling_costs(30), depth=7)
    assert grow_nodes(other, rules) == grow_nodes(plain, rules)
    assert grow_chain(other, 9, 7) == grow_chain(plain, 9, 7)
    short = draft.cut(5, 6)  # slices, as a drafter shows them
    assert grow_nodes(short, rules) == grow_nodes(short.map(np.ascontiguousarray), rules)


def test_numba_is_not_loaded_before_a_pilot_needs_it() -> None:
    code = (
        "import sys; from blockpilot.pilots.registry import load_pilot\nload_pilot('ar'); print('numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "src"}
    )
    assert done.stdout.strip() == "False"


@needs_numba
def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # as if no folder could be written to
    assert jit.compiled("int64(int64)")(lambda number: number + 1)(2) == 3
