"""Pilots as folders."""

import json
from pathlib import Path

import numpy as np
import pytest

from blockpilot.core.errors import InputError
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import load_pilot_folder, read_card, save_pilot
from blockpilot.pilots.forecast import Forecast
from blockpilot.pilots.step import StepPilot
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


def change_card(folder: Path, **changes: object) -> None:
    path = folder / "pilot.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema_version": 9}, "schema_version 9, and this package reads 1"),
        ({"kind": "magic"}, "kind 'magic' is unknown; known: step, prefill"),
        ({"sizes": ["a"]}, "no block sizes"),
        ({"extra": 1}, "field 'extra' is unknown or missing"),
        ({"sha256": "0" * 64}, "checksum"),
        ({"sizes": [4, 8, 16]}, "do not fit together|shape"),
        ({"kind": "prefill"}, "do not fit together"),
    ],
)
def test_a_card_that_is_wrong_is_named(folder: Path, changes: dict[str, object], expected: str) -> None:
    change_card(folder, **changes)
    with pytest.raises(InputError, match=expected) as caught:
        load_pilot_folder(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"model\.safetensors is damaged|checksum"):
        load_pilot_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no complete pilot folder: model\.safetensors"):
        load_pilot_folder(folder)
    (folder / "pilot.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
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
