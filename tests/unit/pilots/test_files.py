"""Pilots as folders."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from blockpilot.core.errors import InputError
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import load_pilot_folder, read_card, save_pilot
from blockpilot.pilots.forecast import Forecast
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from blockpilot.pilots.step import StepPilot
from tests.unit.pilots.hostile import BAD_ARRAYS, change_arrays, change_card
from tests.unit.pilots.pieces import choose_one, make_inputs, random_draft, select_one

RANDOM = np.random.default_rng(0)
CALIBRATION = Calibration(RANDOM.normal(size=(3, 6)).astype(np.float32))


def make_pilot(*, is_chain: bool) -> StepPilot:
    weights = RANDOM.normal(size=(2, 3, 10, 5)).astype(np.float32)
    forecast = Forecast((4, 8), is_chain, 10, weights)
    return StepPilot(CALIBRATION, StepCosts.linear(), is_chain=is_chain, draft_sizes=(4, 8), forecast=forecast)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pilots = [make_pilot(is_chain=False), make_pilot(is_chain=True)]
    save_pilot(tmp_path / "pilot", pilots, target="tiny", drafter="dflash", training={"num_traces": 3})
    return tmp_path / "pilot"


@pytest.mark.parametrize("is_chain", [False, True])
def test_round_trip(tmp_path: Path, is_chain: bool) -> None:
    pilot = make_pilot(is_chain=is_chain)
    save_pilot(tmp_path, [pilot], target="tiny", drafter="dflash", training={})
    again = load_pilot_folder(tmp_path, StepCosts.linear, is_chain=is_chain)
    assert isinstance(again, StepPilot) and again.draft_sizes == (4, 8)
    inputs, draft, first = make_inputs(), random_draft(3), pilot.start(None)
    found = select_one(pilot, inputs, draft, first)
    assert len(found.tree) > 1 and select_one(again, inputs, draft, again.start(None)) == found
    choice, same = choose_one(pilot, inputs, first), choose_one(again, inputs, again.start(None))
    assert choice[:3] == same[:3]
    for temperature in (0.0, 1.0):
        assert choice.calibrations is not None and same.calibrations is not None
        weights = [one.of(temperature).weights for one in (choice.calibrations, same.calibrations)]
        np.testing.assert_array_equal(*weights)


def test_one_folder_serves_trees_and_chains(folder: Path) -> None:
    card = read_card(folder)
    assert (card.kind, card.target, card.drafter, card.sizes) == ("step", "tiny", "dflash", (4, 8))
    assert card.training == {"num_traces": 3}
    assert {file.name for file in folder.iterdir()} == {"pilot.json", "model.safetensors"}
    assert [load_pilot_folder(folder, is_chain=chain).name for chain in (False, True)] == ["step", "chain-step"]


def test_pilots_without_a_fitted_forecast_fall_back_to_the_default(tmp_path: Path) -> None:
    plain = StepPilot(CALIBRATION, StepCosts.linear())
    save_pilot(tmp_path, [plain], target="t", drafter="d", training={})
    again = load_pilot_folder(tmp_path)
    assert isinstance(again, StepPilot) and again.forecast is None and again.draft_sizes == (4, 8, 16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema_version": 9}, "schema_version 9, and this package reads 1"),
        ({"kind": "magic"}, "kind 'magic' is unknown; known: step, prefill"),
        ({"sizes": ["a"]}, r"pilot\.json: Expected int, got str, at sizes\[0\]"),
        ({"sizes": [4, 65]}, r"pilot\.json: Expected int <= 64, at sizes\[1\]"),
        ({"sizes": [8, 4]}, r"the block sizes \(8, 4\) do not rise"),
        ({"config": 3}, r"pilot\.json: Expected object, got int, at config"),
        ({"schema_version": "\n" * 99}, "has schema_version"),
        ({"extra": 1}, "field 'extra' is unknown or missing"),
        ({"sha256": "0" * 64}, "checksum"),
        ({"sizes": [4, 8, 16]}, "do not fit together|shape"),
        ({"kind": "prefill"}, "pilot.json: config: Object missing required field input_size"),
    ],
)
def test_a_card_that_is_wrong_is_named(folder: Path, changes: dict[str, object], expected: str) -> None:
    change_card(folder, **changes)
    with pytest.raises(InputError, match=expected) as caught:
        load_pilot_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", BAD_ARRAYS)
def test_arrays_that_no_pilot_has_are_named(folder: Path, damage: str) -> None:
    change_arrays(folder, BAD_ARRAYS[damage])
    with pytest.raises(InputError, match=r"model\.safetensors") as caught:
        load_pilot_folder(folder)
    assert "\n" not in str(caught.value) and damage.split()[0] in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "x"}, "config: Expected int, got str, at hidden_size"),
        ({"hidden_size": 10**6}, "up to 4096"),
        ({"num_layers": 99}, "1 to 3 layers"),
        ({"input_size": 10**9}, "at most 1,048,576 are supported"),
        ({"input_size": 1 << 20, "hidden_size": 4096}, "does not fit together"),
        ({"inputs": "magic" * 100}, "no such choice as"),
        ({"speed": 1}, "config: unknown field 'speed'"),
    ],
)
def test_a_network_that_no_pilot_has_is_refused_before_it_takes_memory(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    network = PrefillNetwork(PrefillConfig(input_size=5, sizes=(3, 6), hidden_size=4))
    save_pilot(tmp_path, PrefillPilot(network), target="t", drafter="d", training={})
    known = json.loads((tmp_path / "pilot.json").read_text())["config"]
    change_card(tmp_path, config=known | config)
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        load_pilot_folder(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def test_a_folder_of_another_verb_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds a model, no pilot: give a folder of `blockpilot train-pilot`"):
        read_card(tmp_path)
    with pytest.raises(InputError, match="holds a model, no pilot: choose another --out"):
        save_pilot(tmp_path, [make_pilot(is_chain=True)], target="t", drafter="d", training={})


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"model\.safetensors is damaged|checksum"):
        load_pilot_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no complete pilot folder: model\.safetensors"):
        load_pilot_folder(folder)
    (folder / "pilot.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_pilot_folder(folder)
    with pytest.raises(InputError, match=r"no pilot folder: pilot\.json: No such file"):
        load_pilot_folder(folder.parent)


def test_sizes_beyond_the_drafter_name_both_sides(folder: Path) -> None:
    with pytest.raises(InputError, match=r"block sizes up to 8 .* can do 6 at most"):
        load_pilot_folder(folder, max_block_size=6)


def test_pilots_that_share_nothing_do_not_share_a_folder(tmp_path: Path) -> None:
    other = StepPilot(Calibration.identity(), StepCosts.linear(), draft_sizes=(4, 8))
    with pytest.raises(InputError, match="share"):
        save_pilot(tmp_path, [make_pilot(is_chain=True), other], target="t", drafter="d", training={})
