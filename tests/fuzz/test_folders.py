"""Random changes of what verbs hand to each other: runs, traces, pilots, profiles, texts, checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st

from blockpilot.core.manifests import write_manifest
from blockpilot.engine.profile import read_profile
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import load_pilot_folder, save_pilot
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.pilot_training import read_group
from blockpilot.report.build import build_report
from blockpilot.report.run_data import read_run
from blockpilot.training.checkpoints import CHECKPOINT
from blockpilot.training.responses import Response, read_responses, shard_path, write_shard
from tests.fuzz.damage import damage_file
from tests.fuzz.profiles import SOURCES, fuzz, refuses
from tests.unit.replay.pieces import make_pair, run_collect
from tests.unit.report.hostile import FILES, change, find_places, write_whole
from tests.unit.training.pieces import ignore, make_trainer

STEP = {"steps": 2, "batch_size": 2, "checkpoint_every": 1}


def write_pilot(folder: Path) -> None:
    pilot = StepPilot(Calibration.identity(), StepCosts.linear(), is_chain=False, draft_sizes=(4, 8))
    save_pilot(folder, [pilot], target="tiny", drafter="dflash", training={"num_traces": 3})


def write_prefill(folder: Path) -> None:
    config = PrefillConfig(input_size=61, sizes=(2, 4, 8), hidden_size=8)
    save_pilot(folder, PrefillPilot(PrefillNetwork(config)), target="tiny", drafter="dflash", training={})


def write_texts(folder: Path) -> None:
    write_manifest(folder, {"config": {"target": "tiny"}, "is_complete": True})
    for index in range(2):
        write_shard(shard_path(folder, index), [Response([1, 2, 3, 4], 2), Response([5, 6], 1)])


def write_profile(folder: Path) -> None:
    folder.mkdir()
    (folder / "profile.json").write_text(json.dumps(StepCosts.linear().to_dict()), encoding="utf-8")


def write_traces(folder: Path) -> None:
    run_collect(make_pair(), folder)


def write_checkpoint(folder: Path) -> None:
    make_trainer(folder, **STEP).run(ignore)


KINDS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {  # what writes a folder, what reads it
    "run": (write_whole, read_run),
    "pilot": (write_pilot, lambda folder: load_pilot_folder(folder, StepCosts.linear)),
    "prefill": (write_prefill, lambda folder: load_pilot_folder(folder, StepCosts.linear)),
    "texts": (write_texts, read_responses),
    "profile": (write_profile, lambda folder: read_profile(folder / "profile.json")),
    "traces": (write_traces, lambda folder: read_group([folder])),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    for kind, (write, read) in KINDS.items():
        write(folder / kind)
        assert not refuses(lambda read=read, kind=kind: read(folder / kind))
    write_checkpoint(folder / "checkpoint")
    return folder


def copy(folder: Path) -> Path:
    place = folder.parent / f"{folder.name}-copy"
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(folder, place))


@fuzz(SOURCES, share=0.2)
def test_reports(good: Path, random: Random) -> None:
    """With figures; a run that can be read can be shown."""
    folder = copy(good / "run")
    damage_file(folder / random.choice(FILES), [good / "run" / "rows.jsonl"], random)
    refuses(lambda: build_report([folder], folder))


@pytest.mark.parametrize("kind", KINDS)
@fuzz(SOURCES)
def test_folders(good: Path, kind: str, random: Random) -> None:
    folder = copy(good / kind)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    damage_file(random.choice(files), sorted((good / "texts").iterdir()), random)
    refuses(lambda: KINDS[kind][1](folder))


def spoil_checkpoint(folder: Path, place: list[str | int], what: object) -> None:
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    torch.save(change(state, tuple(place), what), folder / CHECKPOINT)


@fuzz(st.sampled_from(("step", "exp_avg", "exp_avg_sq")), st.sampled_from((None, 3, [], "x", float("nan"))), share=0.3)
@example("exp_avg", torch.zeros(7))
@example("exp_avg_sq", torch.zeros(()))
@example("step", torch.tensor(-1.0))
@example("step", torch.tensor(float("nan")))
def test_moments_of_another_kind_are_refused_before_a_step(good: Path, name: str, what: object) -> None:
    folder = copy(good / "checkpoint")
    spoil_checkpoint(folder, ["optimizers", 0, "state", 0, name], what)
    assert refuses(lambda: make_trainer(folder, **STEP))


@fuzz(SOURCES)
def test_checkpoints(good: Path, random: Random) -> None:
    """What is not refused goes on to the end."""
    folder = copy(good / "checkpoint")
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    state["step"] = 1  # one more is to be done
    place = random.choice(list(find_places(state)))
    what = random.choice((place, None, -1, 1e300, [], {}, "x", (0.5,), torch.zeros(2), torch.ones(3, dtype=torch.int8)))
    torch.save(change(state, place, what), folder / CHECKPOINT)
    refuses(lambda: make_trainer(folder, **STEP).run(ignore))
