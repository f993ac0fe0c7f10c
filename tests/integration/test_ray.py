"""`collect --ray` and `bench --ray` on a local cluster: the files of a local run, also when workers die."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpilot.bench.answers import AnswersFile
from blockpilot.cli.main import main
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models.dflash_format import save_dflash
from blockpilot.replay.trace_files import shard_path
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target

ray = pytest.importorskip("ray")

from blockpilot.integrations.ray import bench, collect  # noqa: E402
from blockpilot.integrations.ray.cluster import MAX_LOSSES, Placement, Pool  # noqa: E402
from tests.integration.fragile import Fragile  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("BLOCKPILOT_RAY_ALONE" not in os.environ, reason="runs in a process of its own: test_ray_alone"),
]
TIMES = ("tokens_per_second", "speedup", "speedup_ci", "end_to_end_speedup", "milliseconds_per_step")
TIMES += ("time_to_first_token", "peak_memory_bytes", "over_best_fixed", "over_best_chain", "best_fixed_of_task")


@pytest.fixture(scope="module", autouse=True)
def running_cluster() -> Iterator[None]:
    """Commands use the cluster that this process has opened."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    save_dflash(make_dflash(is_second=True), folder / "drafter")
    lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}"}) for place in range(7)]
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def words(verb: str, folder: Path, out: Path, *more: str) -> list[str]:
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return [verb, "--prompts", str(folder / "quiz.jsonl"), "--split", "all", "--out", str(out), *models, *more]


def die_once(marker: Path) -> None:
    """Ends the process of the first worker that comes here."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os._exit(1)


class DyingCollectWorker(collect.CollectWorker):
    def trace(self, index: int) -> bytes:
        die_once(Path(self.job.target).parent / "a-collector-died")
        return super().trace(index)


class DyingSite(bench.WorkerSite):
    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.folder = Path(str(setup.target)).parent

    def answer_whole_round(self, *arguments: Any) -> Any:
        die_once(self.folder / "a-bencher-died")
        return super().answer_whole_round(*arguments)


def test_a_collection_survives_a_killed_worker_and_gives_the_bytes_of_a_local_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--sizes", "2-4,8", "--max-new-tokens", "12", "--shard-size", "2", "--temperature", "1"]
    assert main(words("collect", folder, tmp_path / "local", *small)) == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert len(expected) == 5
    monkeypatch.setattr(collect, "CollectWorker", DyingCollectWorker)
    out = tmp_path / "spread"
    assert main(words("collect", folder, out, *small, "--ray", "--ray-workers", "2")) == 0
    assert (folder / "a-collector-died").exists()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    shard_path(out, 1).unlink()  # a run begun with Ray goes on without
    assert main(words("collect", folder, out, *small)) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    assert "7 of 7" in capsys.readouterr().err


def test_a_benchmark_survives_a_killed_worker_and_gives_the_rows_of_a_local_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--methods", "dflash:3,ngram", "--max-new-tokens", "8", "--num-prompts", "5", "--json"]
    assert main(words("bench", folder, tmp_path / "local", *small)) == 0
    local = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(bench, "WorkerSite", DyingSite)
    out = tmp_path / "spread"
    assert main(words("bench", folder, out, *small, "--ray", "--ray-workers", "2")) == 0
    spoken = capsys.readouterr()
    spread = json.loads(spoken.out)
    assert (folder / "a-bencher-died").exists()
    assert "timings compare only with one worker per machine" in spoken.err and "15 of 15 answers" in spoken.err
    assert [without_times(row) for row in spread["rows"]] == [without_times(row) for row in local["rows"]]
    assert spread["manifest"]["id"] == local["manifest"]["id"]
    before = (out / "answers.jsonl").read_bytes()
    (out / "answers.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:-3]))
    assert main(words("bench", folder, out, *small)) == 0  # one round is measured here
    assert (out / "answers.jsonl").read_bytes()[: len(before) // 2] == before[: len(before) // 2]
    assert len(AnswersFile(out / "answers.jsonl").answers) == 15


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in TIMES}
    return kept | {"per_prompt": [(prompt["id"], prompt["tau"]) for prompt in row["per_prompt"]]}


def make_pool(num_workers: int) -> Pool:
    return Pool(Fragile, [Placement(ray.nodes()[0]["NodeID"], num_threads=0, num_gpus=0)] * num_workers)


def test_lost_work_is_given_to_others_until_nobody_is_left_or_it_was_lost_too_often() -> None:
    done: list[str] = []
    with make_pool(4) as pool:
        with pytest.raises(BlockPilotError, match=r"a shard was lost 3 times \(what was done is kept"):
            done.extend(found for _, found in pool.run("work", [("a",), ("die",), ("b",)]))
        assert len(pool.workers) == 4 - MAX_LOSSES
        assert pool.ask("work", "c") == "c"
        with pytest.raises(BlockPilotError, match=r"all workers died \(what was done is kept"):
            pool.ask("work", "die")
    assert set(done) <= {"a", "b"}


def test_errors_inside_a_worker_are_told_as_a_local_run_would() -> None:
    with make_pool(1) as pool:
        with pytest.raises(InputError, match=r"^nothing of that name: choose another$"):
            pool.ask("work", "refuse")
        with pytest.raises(BlockPilotError, match=r"a worker failed .*: KeyError: 'lost'"):
            pool.ask("work", "fail")
