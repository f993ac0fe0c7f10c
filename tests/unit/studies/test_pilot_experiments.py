"""Tables, splits and judgements on made-up traces whose right answers are known, and the whole script on a folder."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pilot_experiments
import pytest
from pilot_study.request_sizes import best_fixed, judge_halves, optimal_rows, split_rows
from pilot_study.trace_tables import SizeTable, part_taus, read_traces
from pilot_study.variants import PrefillInputs, judge_choice, list_variants, predict, train_variant

from blockpilot.core.errors import InputError
from blockpilot.core.manifests import write_manifest
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.replay.simulate import SimulatedStep, total, walk_chain
from blockpilot.replay.trace_files import TraceSet, require_disjoint
from blockpilot.replay.traces import DraftColumns, Trace
from tests.unit.studies.pieces import SIZES, make_trace, write_traces

WINDOW = (14, 15, 16, 17, 18)


def make_traces(count: int, start: int = 0) -> list[Trace]:
    return [make_trace(f"p{start + i}", WINDOW[i % 5], task=("even", "odd")[i % 2]) for i in range(count)]


def test_parts_of_a_walk_have_the_same_tokens_at_every_size() -> None:
    lengths = [2, 6, 4, 20, 32, 16]
    anchors = np.concatenate(([0], np.cumsum(lengths)))[:-1].tolist()
    steps = [
        SimulatedStep(anchor=anchor, block_size=32, verify_size=32, emitted=length)
        for anchor, length in zip(anchors, lengths, strict=True)
    ]
    taus = part_taus(steps, loop=10)
    assert taus["whole"] == pytest.approx(80 / 6)
    assert 2 / (1 / taus["first"] + 1 / taus["second"]) == pytest.approx(taus["whole"])
    assert taus["first"] == pytest.approx(40 / (4 + 8 / 32))  # four steps and a quarter of the fifth
    assert taus["odd"] == pytest.approx(48 / 5)  # tokens 0 to 31 and 64 to 79: four steps whole, and the last
    assert taus["even"] == pytest.approx(32 / 1)
    assert taus["loop_free"] == pytest.approx((2 + 6 + 4) / 3)


def test_prices_are_those_of_the_walks() -> None:
    traces = [replace(trace, max_new_tokens=trace.num_anchors + 1) for trace in make_traces(3)]
    table, costs = SizeTable.of(traces, (1, *SIZES)), StepCosts.linear(0.25, 1.0, 0.05)
    found = table.milliseconds(costs)
    for row, trace in enumerate(traces):
        for column, size in enumerate(table.sizes):
            assert found[row, column] == pytest.approx(total([walk_chain(trace, size, costs)]).milliseconds)
            assert table.tau[row, column] == pytest.approx(total([walk_chain(trace, size)]).tau)


def test_optimal_sizes_are_counted_per_task() -> None:
    table = SizeTable.of(make_traces(10), SIZES)
    rows = {row["task"]: row for row in optimal_rows(table, WINDOW, 16)}
    assert list(rows) == ["even", "odd", "all"] and rows["all"]["counts"] == {str(size): 2 for size in WINDOW}
    assert rows["all"]["best_beats_trained"]["below 5%"] == pytest.approx(0.2) and best_fixed(table, SIZES) == 16


def test_a_real_preference_lasts_and_luck_does_not() -> None:
    table = SizeTable.of(make_traces(40), SIZES)
    for row in split_rows(table, WINDOW, trained=16, fixed=16):
        assert row["captured"]["value"] == pytest.approx(1, abs=0.1)
    draw = np.random.default_rng(0)
    lucky = replace(table, parts={name: np.exp(0.1 * draw.normal(size=tau.shape)) for name, tau in table.parts.items()})
    judged = judge_halves(lucky, WINDOW, ("first", "second"), references=(16, 16))
    assert judged["captured"]["low"] < 0 < judged["captured"]["high"] and judged["same_choice"] < 0.5
    assert judged["oracle_gain_over_best_fixed"]["value"] > 0.05


def test_the_published_network_learns_what_the_prefill_tells() -> None:
    train, test = make_traces(60), make_traces(20, start=100)
    tables = [SizeTable.of(traces, SIZES) for traces in (train, test)]
    variant = list_variants(SIZES, 16, num_steps=300, shrink=64)[0]
    assert variant.sizes == WINDOW
    network = train_variant(variant, PrefillInputs(train, "cpu"), tables[0].columns(WINDOW))
    chosen = np.array(WINDOW)[predict(network, PrefillInputs(test, "cpu")).argmax(axis=1)]
    row = judge_choice(tables[1], chosen, WINDOW, trained=16, fixed=16)
    assert row["accuracy"] == 1 and row["captured"]["value"] == pytest.approx(1)
    assert row["accuracy_of_best_fixed"] == pytest.approx(0.2) and row["gain_over_trained"]["low"] > 0


def test_without_the_window_all_sizes_are_candidates_and_the_radius_is_left_out() -> None:
    groups = {variant.group for variant in list_variants((4, 8, 16), 16, num_steps=1)}
    assert "radius" not in groups and "main" in groups
    assert list_variants((4, 8, 16), 16, num_steps=1)[0].sizes == (4, 8, 16)
    assert sum(variant.group == "radius" for variant in list_variants(SIZES, 16, num_steps=1)) == 2


def test_the_whole_script_runs_on_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = make_traces(20), make_traces(10, start=50)
    with pytest.raises(InputError, match=r"1 prompts are in training and test traces, such as 'p3'"):
        require_disjoint(train, [*test, train[3]])
    folders = [str(write_traces(tmp_path / name, found)) for name, found in (("train", train), ("test", test))]
    arguments = ["x", "--train", folders[0], "--test", folders[1], "--quick", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", arguments)
    pilot_experiments.main()
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert {row["experiment"] for row in rows} == {"optimal sizes", "split", "prefill", "load"}
    loads = {(row["load"], row["name"]): row["speedup"]["value"] for row in rows if row["experiment"] == "load"}
    assert (
        loads["flat", "oracle per step (chains)"]
        >= loads["flat", "oracle per request"]
        > loads["flat", "best fixed (16)"]
    )
    assert "### Under step costs" in (tmp_path / "out" / "tables.md").read_text()
    assert all((tmp_path / "out" / name).stat().st_size for name in ("optimal_sizes.svg", "gains.svg", "manifest.json"))


def test_candidates_are_kept_of_some_traces_among_those_that_hold_them(tmp_path: Path) -> None:
    columns = DraftColumns(
        log_probs=np.zeros((96, 1, 2)), entropy=np.zeros((96, 1)), true_ranks=np.zeros((96, 1), np.uint8)
    )
    drafted = [replace(trace, drafts={2: columns}) for trace in make_traces(6, start=20)]
    folders = [write_traces(tmp_path / "a", make_traces(8)), write_traces(tmp_path / "b", drafted)]
    write_manifest(folders[1], {**TraceSet(folders[1]).manifest, "draft_sizes": [2]})
    for wanted, held in ((0, []), (3, ["p20", "p22", "p24"]), (100, [trace.prompt_id for trace in drafted])):
        traces = read_traces(folders, like=None, num_drafted=wanted)
        assert len(traces) == 14 and [trace.prompt_id for trace in traces if trace.drafts] == held


def test_parts_computed_apart_are_joined_when_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        str(write_traces(tmp_path / name, make_traces(count, start)))
        for name, count, start in (("train", 12, 0), ("test", 6, 50))
    ]
    given = ["--train", folders[0], "--test", folders[1], "--quick"]

    def run(name: str, *arguments: str) -> set[str]:
        monkeypatch.setattr("sys.argv", ["x", *arguments, "--out", str(tmp_path / name)])
        pilot_experiments.main()
        return set((tmp_path / name / "rows.jsonl").read_text().splitlines())

    parts = [run(part, *given, "--part", part) for part in ("networks", "walks")]
    assert parts[0] - parts[1] and parts[1] - parts[0]
    joined = run("joined", "--draw", *(str(tmp_path / part) for part in ("networks", "walks")))
    assert joined == parts[0] | parts[1] == run("all", *given)
    tables = [(tmp_path / name / "tables.md").read_text().splitlines() for name in ("joined", "all")]
    assert sorted(tables[0]) == sorted(tables[1]) and (tmp_path / "joined" / "gains.svg").is_file()
    assert json.loads((tmp_path / "joined" / "manifest.json").read_text())["part"] == "all"
    monkeypatch.setattr("sys.argv", ["x", "--draw", str(tmp_path / "train")])
    with pytest.raises(SystemExit, match="holds no rows of an earlier run"):
        pilot_experiments.main()
