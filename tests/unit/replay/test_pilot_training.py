"""From traces to pilots, and the judgement of what they gain."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockpilot.bench.methods import find_paper_pilot
from blockpilot.cli.main import main
from blockpilot.core.errors import InputError
from blockpilot.core.manifests import write_manifest
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import read_card
from blockpilot.pilots.registry import load_pilot
from blockpilot.pilots.step import StepPilot
from blockpilot.replay import pilot_report
from blockpilot.replay.collect import collect
from blockpilot.replay.pilot_report import compare, judge_calibration
from blockpilot.replay.pilot_training import drafts_of, hold_out, read_group, train_step
from blockpilot.replay.simulate import SimulatedStep, simulate, walk_chain
from blockpilot.replay.trace_files import TraceSet, shard_path, write_shard
from tests.unit.replay.pieces import SIZES, ignore, make_config, make_pair, make_requests, run_collect

FOLDERS = ("a", "b")
HELD_OUT = "c"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("traces")
    llm = make_pair()
    for seed, name in enumerate(FOLDERS):
        run_collect(llm, root / name, temperature=1.0, seed=seed)
    others = [replace(request, prompt_id=f"other-{request.prompt_id}") for request in make_requests(llm, seed=70)]
    collect(llm, others, make_config(temperature=1.0, seed=70), out=root / HELD_OUT, report=ignore)
    return [root / name for name in FOLDERS]


def test_drafts_join_the_traces_in_order(folders: list[Path]) -> None:
    group = read_group(folders)
    drafts = drafts_of(group.traces, 8)
    assert len(drafts) == group.num_anchors
    third = group.traces[2]
    np.testing.assert_array_equal(drafts.candidates(drafts.starts[2] + 1).log_probs, third.draft(8).log_probs[1])


def test_the_fixed_size_is_chosen_on_the_training_traces(folders: list[Path]) -> None:
    group = read_group(folders)
    train, test = group.traces[:8], group.traces[8:]
    costs = StepCosts.linear(0.2, 1.0, 0.1)
    tree, chain = train_step(group)
    rows = {row.method: row for row in compare(train, test, [chain, tree], costs, load="x")}
    times = {}
    for size in SIZES:  # by hand, from the lengths that the traces hold
        steps = [step for trace in train for step in walk_chain(trace, size)]
        times[size] = sum((0.2 if step.block_size > 1 else 0) + 1 + 0.1 * (step.verify_size - 1) for step in steps)
    name = f"best fixed (fixed:{min(times, key=times.__getitem__)})"
    assert rows[name].over_best_fixed == 1 and rows[name].interval == (1, 1)
    assert rows["ar"].tau == rows["ar"].over_plain == 1
    assert rows["oracle per step"].over_plain >= rows["oracle per request"].over_plain >= rows[name].over_plain
    assert rows["step"].interval[0] <= rows["step"].over_best_fixed <= rows["step"].interval[1]


@pytest.mark.parametrize("padding", [(), (1, 2, 4, 8, 16)])
def test_under_the_costs_of_a_device_pilots_choose_one_step_late(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, padding: tuple[int, ...]
) -> None:
    traces = read_group(folders).traces
    seen = set()

    def spy(*given: object, is_pipelined: bool = False) -> list[SimulatedStep]:
        seen.add(is_pipelined)
        return simulate(*given, is_pipelined=is_pipelined)  # type: ignore[arg-type]

    monkeypatch.setattr(pilot_report, "simulate", spy)
    costs = replace(StepCosts.linear(0.2, 1.0, 0.1), padding=padding)
    compare(traces[:8], traces[8:], [StepPilot(Calibration.identity(), costs, draft_sizes=(3, 8))], costs, load="x")
    assert seen == ({False, True} if padding else {False})


def test_calibration_is_judged_per_task_and_pooled(folders: list[Path]) -> None:
    reports = judge_calibration(StepPilot(Calibration.identity(), StepCosts.linear()), read_group(folders).traces)
    assert set(reports) == {"tiny", "all"}
    assert reports["tiny"] == reports["all"] and reports["all"].num_nodes > 100
    assert 0 <= reports["all"].error <= 1


def test_held_out_traces_are_others(folders: list[Path]) -> None:
    group = read_group(folders)
    train, test = hold_out(group, share=2)
    ids = [{trace.prompt_id for trace in part.traces} for part in (train, test)]
    assert len(train.traces) + len(test.traces) == len(group.traces) and not ids[0] & ids[1]


def test_traces_of_another_making_are_refused(folders: list[Path], tmp_path: Path) -> None:
    run_collect(make_pair(), tmp_path / "other", count=1, num_candidates=3)
    with pytest.raises(InputError, match="num_candidates is 3 there and 5 elsewhere"):
        read_group([folders[0], tmp_path / "other"])


@pytest.mark.parametrize("kind", ["step", "prefill"])
def test_the_command_writes_a_pilot_that_loads(
    kind: str, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--traces", *map(str, folders), "--out", str(tmp_path / "p"), "--json"]
    words += ["--held-out", str(folders[0].parent / HELD_OUT)]
    extra = ["--sizes", "3,8", "--hidden-size", "8", "--epochs", "2"] if kind == "prefill" else []
    assert main(["train-pilot", "--kind", kind, *words, *extra]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["load"] for row in result["rows"]} >= {"flat", "saturated"}
    card = read_card(tmp_path / "p")
    assert card.kind == kind and card.training["num_traces"] == 10
    llm = make_pair()
    pilot = load_pilot(str(tmp_path / "p"), target=llm.target_name, drafter="dflash", max_block_size=64)
    ids = [request.prompt_ids for request in make_requests(llm)]
    answers, plain = (llm.generate(ids, pilot=chosen) for chosen in (pilot, "ar"))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]


def test_a_network_reads_whole_logits_where_traces_keep_them(folders: list[Path], tmp_path: Path) -> None:
    llm = make_pair()
    whole = [str(tmp_path / name) for name in ("one", "two", "three")]
    for seed, name in enumerate(whole):
        run_collect(llm, Path(name), temperature=1.0, seed=seed, whole_logits=True, precision="float16")
    network = ["--kind", "prefill", "--sizes", "3,8", "--input", "logits", "--ties", "trained", "--hidden-size", "8"]
    words = ["--traces", *whole, "--epochs", "2", "--out", str(tmp_path / "p")]
    assert main(["train-pilot", *network, *words, "--held-out", str(folders[0].parent / HELD_OUT)]) == 2
    assert main(["train-pilot", *network, *words]) == 0
    card = read_card(tmp_path / "p")
    assert card.config["inputs"] == "logits" and card.config["dropout"] == 0.2
    assert card.training["ties"] == "trained" and card.training["has_whole_inputs"] is True
    ids = [request.prompt_ids for request in make_requests(llm)]
    answers, plain = (llm.generate(ids, pilot=chosen) for chosen in (f"prefill:{tmp_path / 'p'}", "ar"))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]


def test_too_few_and_missing_traces_are_named(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "p")]
    assert main(["train-pilot", "--traces", str(folders[0]), *out]) == 2
    assert "too few, at least 8" in capsys.readouterr().err
    assert main(["train-pilot", "--traces", str(tmp_path / "none"), *out]) == 2
    assert "holds no traces" in capsys.readouterr().err
    both, held_out = [*map(str, folders)], str(folders[0].parent / HELD_OUT)
    assert main(["train-pilot", "--traces", *both, "--held-out", both[1], *out]) == 2
    assert "5 prompts are in training and test traces, such as 'p0'" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    assert main(["train-pilot", "--traces", *both, "--held-out", held_out, "--kind", "prefill", *out]) == 2
    assert "block size 6 is not in the traces" in capsys.readouterr().err
    logits = ["--kind", "prefill", "--sizes", "3,8", "--input", "logits"]
    assert main(["train-pilot", "--traces", *both, "--held-out", held_out, *logits, *out]) == 2
    assert "keep the likeliest first tokens alone: collect with --whole-logits" in capsys.readouterr().err
    assert main(["train-pilot", "--kind", "prefill", "--traces", *both, "--device", "mps", *out]) == 2
    assert "unknown device 'mps': use cpu or cuda" in capsys.readouterr().err


def test_the_command_alone_builds_the_papers_pilot_from_shipped_traces(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("blockpilot.replay.trace_files.ASSETS", tmp_path)
    assert main(["train-pilot", "--kind", "prefill"]) == 2
    assert "no traces ship for smollm2-135m: give --traces" in capsys.readouterr().err
    shipped = tmp_path / "smollm2-135m-traces"
    all_folders = [*folders, folders[0].parent / HELD_OUT]
    traces = [replace(trace, drafts={}) for folder in all_folders for trace in TraceSet(folder)]
    write_shard(shard_path(shipped, 0), traces, "float16")
    write_manifest(shipped, TraceSet(all_folders[0]).manifest | {"draft_sizes": [], "num_traces": len(traces)})
    words = ["--sizes", "3,8", "--hidden-size", "8", "--epochs", "2"]
    assert main(["train-pilot", "--kind", "prefill", *words]) == 0
    spoken = capsys.readouterr()
    assert "2 of 2 epochs: training the network" in spoken.err and "oracle per step" in spoken.out
    target = TraceSet(shipped).manifest["target"]
    card = read_card(find_paper_pilot(target, None))
    assert card.kind == "prefill" and card.sizes == (3, 8) and card.training["num_held_out"] > 0
    assert main(["train-pilot"]) == 2
    assert "--kind step needs --traces and --out" in capsys.readouterr().err
