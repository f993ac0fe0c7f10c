"""The arithmetic on released tables: lengths behind tau, honest predictors, the noise model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import released_sweeps
from pilot_study.intervals import Bootstrap
from pilot_study.sweep_noise import fit_noise, oracle_gains, root_bias, simulate_gains
from pilot_study.sweep_predictors import Predictor, best_fixed, leave_one_out, nearest_neighbours, ridge
from pilot_study.sweeps import Sweep, best_sizes, count_ties, flat_shares, likeliest_lengths

WIDE = (4, 8, 13, 14, 15, 16, 17, 18, 19, 32)
WINDOW = (14, 15, 16, 17, 18)
SIZES = np.arange(13, 20)
CANDIDATES = np.isin(SIZES, WINDOW)


def make_sweep(num_samples: int = 20) -> Sweep:
    draw = np.random.default_rng(0)
    tau = 6 * np.exp(0.2 * draw.normal(size=(num_samples, 1)) + 0.05 * draw.normal(size=(num_samples, len(WIDE))))
    return Sweep(WIDE, tau, np.full(num_samples, 16), ("one",) * num_samples)


def test_bootstrap_pairs_rows_and_keeps_tasks_apart() -> None:
    tasks = ["a"] * 5 + ["b"] * 3
    bootstrap = Bootstrap(tasks)
    assert (bootstrap.rows[:, :5] < 5).all() and (bootstrap.rows[:, 5:] >= 5).all()
    base = np.arange(1.0, 9.0)
    gain = bootstrap.gain(1.1 * base, base)
    assert [gain.value, gain.low, gain.high] == pytest.approx([0.1] * 3)
    assert bootstrap.captured(base + 1, base, base + 4).value == pytest.approx(0.25)
    assert bootstrap.captured(base, base, base).to_dict() == {"value": None, "low": None, "high": None}
    mean = bootstrap.mean(base)
    assert mean.low < mean.value == 4.5 < mean.high


def test_lengths_are_told_from_tau() -> None:
    alike = likeliest_lengths(np.array([240 / 31, 240 / 30, 240 / 32, 240 / 34]))  # 8 and 7.5 hide their factors
    assert (alike.tokens, alike.steps, alike.spread) == ((240,) * 4, (31, 30, 32, 34), 0)
    assert likeliest_lengths(np.array([689 / 86, 744 / 95, 744 / 97])).spread == 744 - 689


def test_the_smaller_of_two_best_sizes_counts() -> None:
    sweep = replace(make_sweep(2), tau=np.array([[1.0] * 10, [1, 1, 1, 1, 1, 2, 3, 1, 1, 1]]))
    assert best_sizes(sweep, WINDOW).tolist() == [14, 17] and count_ties(sweep, WINDOW) == 1
    assert sweep.at(np.array([16, 17])).tolist() == [1, 3]
    assert flat_shares(np.array([[1.0, 1.015], [1.0, 1.2]]), np.ones(2)) == {
        "below 1%": 0.0,
        "below 2%": 0.5,
        "below 5%": 0.5,
    }


@pytest.mark.parametrize(
    "predictor",
    [
        best_fixed(WINDOW),
        nearest_neighbours((4, 8, 13, 19, 32), WINDOW, 3),
        ridge((4, 8, 13, 19, 32), WINDOW, 1),
        ridge((13, 15, 17, 19), (14, 16, 18), 1),
    ],
    ids=["fixed", "neighbours", "ridge", "ridge-odd"],
)
def test_a_predictor_does_not_see_what_it_is_judged_on(predictor: Predictor) -> None:
    sweep = make_sweep()
    before = leave_one_out(predictor, sweep)
    assert len(set(before.tolist())) > 1
    for row in range(0, len(sweep), 5):
        changed = sweep.tau.copy()
        changed[row, [WIDE.index(size) for size in (14, 16, 18)]] *= (3, 1, 0.2)
        assert leave_one_out(predictor, replace(sweep, tau=changed))[row] == before[row]


def test_a_predictor_finds_what_other_sizes_tell() -> None:
    sweep = make_sweep(40)
    slopes = np.random.default_rng(1).normal(size=40) * 0.1
    tau = 6 * np.exp(slopes[:, None] * (np.array(WIDE) - 16) / 4)
    chosen = leave_one_out(ridge((4, 8, 13, 19, 32), WINDOW, 0.1), replace(sweep, tau=tau))
    assert (chosen == np.where(slopes > 0, 18, 14)).mean() > 0.9


def test_noise_alone_explains_a_table_without_preferences() -> None:
    draw = np.random.default_rng(2)
    mean = -0.01 * (SIZES - 16.0) ** 2
    tau = np.exp(1.8 + 0.2 * draw.normal(size=(400, 1)) + mean + 0.04 * draw.normal(size=(400, 7)))
    report = simulate_gains(fit_noise(tau, SIZES, 1), CANDIDATES, 3, num_simulations=20)
    observed = oracle_gains(tau, CANDIDATES, 3)
    assert report.noise == pytest.approx(0.04, rel=0.1)
    assert report.noise_only == pytest.approx(observed, rel=0.1) and report.both == pytest.approx(observed, rel=0.1)
    assert report.knowable[1] < 0.1 * observed[1]


def test_smooth_preferences_are_knowable() -> None:
    draw = np.random.default_rng(3)
    slopes = 0.05 * draw.normal(size=(400, 1))
    tau = np.exp(1.8 + slopes * (SIZES - 16) - 0.01 * (SIZES - 16.0) ** 2 + 0.002 * draw.normal(size=(400, 7)))
    report = simulate_gains(fit_noise(tau, SIZES, 1), CANDIDATES, 3, num_simulations=20)
    observed = oracle_gains(tau, CANDIDATES, 3)
    assert report.knowable == pytest.approx(observed, rel=0.15) and report.noise_only[1] < 0.1 * observed[1]


def test_root_bias_is_that_of_small_samples() -> None:
    assert [root_bias(1), root_bias(4)] == pytest.approx([0.7979, 0.9400], abs=1e-4)


def test_the_whole_script_runs_on_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("gsm8k", "math500"):
        sweep = make_sweep(8)
        best = best_sizes(sweep, WINDOW).tolist()
        samples = [
            {"tau": dict(zip(map(str, WIDE), row, strict=True)), "released_choice": size}
            for row, size in zip(sweep.tau.tolist(), best, strict=True)
        ]
        (tmp_path / f"{task}.json").write_text(json.dumps({"task": task, "block_sizes": WIDE, "samples": samples}))
    monkeypatch.setattr("sys.argv", ["x", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    released_sweeps.main()
    found = json.loads((tmp_path / "out" / "released_sweeps.json").read_text())
    assert found["both"]["released_equals_oracle"] == found["both"]["num_samples"] == 16
    ways = {way["name"]: way["gain_over_best_fixed"]["value"] for way in found["both"]["ways"]}
    assert ways["released predictor"] == ways["oracle 14..18"] > ways["best fixed, leave one out"]
    assert (tmp_path / "out" / "released_sweeps.svg").stat().st_size < 100_000
