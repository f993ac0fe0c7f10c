"""Pilots by name."""

from pathlib import Path

import numpy as np
import pytest

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.pilots import registry
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import save_pilot
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot
from blockpilot.pilots.registry import load_pilot
from blockpilot.pilots.step import StepPilot


@pytest.mark.parametrize(
    "spec",
    [
        *("ar", "fixed:2", f"fixed:{MAX_BLOCK_SIZE}", "tree:1", "tree:3@4", f"tree:{MAX_TREE_NODES}"),
        *("step", "chain-step", "auto"),
    ],
)
def test_a_pilot_is_called_what_it_was_asked_for(spec: str) -> None:
    assert load_pilot(spec).name == spec


def test_kinds() -> None:
    assert load_pilot("fixed:8") == FixedPilot(8)
    assert load_pilot("tree:31") == TreePilot(31)


def test_a_block_of_one_is_plain_decoding() -> None:
    assert load_pilot("fixed:1") == PlainPilot()


def test_auto_drafts_only_with_a_drafter() -> None:
    assert load_pilot("auto", has_drafter=False) == PlainPilot()
    assert load_pilot("auto", has_drafter=True).num_candidates > 0


def test_costs_are_asked_for_only_by_pilots_that_weigh_them() -> None:
    def refuse() -> StepCosts:
        raise AssertionError("measured for nothing")

    for spec in ("ar", "fixed:4", "tree:3"):
        load_pilot(spec, costs=refuse)
    load_pilot("auto", has_drafter=False, costs=refuse)
    costs = StepCosts.linear(slope=0.5)
    for spec in ("auto", "step", "chain-step"):
        pilot = load_pilot(spec, costs=lambda: costs)
        assert isinstance(pilot, StepPilot) and pilot.costs is costs and pilot.is_chain == (spec == "chain-step")


def save_fitted(folder: Path) -> None:
    calibration = Calibration(np.full((2, 6), 0.5, dtype=np.float32))
    pilot = StepPilot(calibration, StepCosts.linear(), draft_sizes=(4, 32))
    save_pilot(folder, [pilot], target="pair", drafter="its-drafter", training={})


def test_the_shipped_pilot_serves_its_own_pair_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ASSETS", tmp_path)
    save_fitted(tmp_path / "pair-pilot")
    for spec in ("auto", "step", "chain-step"):
        ours = load_pilot(spec, target="pair", drafter="its-drafter")
        assert isinstance(ours, StepPilot) and ours.draft_sizes == (4, 32) and ours.name == spec
    for target, drafter in (("pair", "another"), ("other", "its-drafter"), ("../pair", "its-drafter")):
        theirs = load_pilot("auto", target=target, drafter=drafter)
        assert isinstance(theirs, StepPilot) and theirs.draft_sizes == (4, 8, 16)


def test_folders(tmp_path: Path) -> None:
    save_fitted(tmp_path / "mine")
    assert load_pilot(str(tmp_path / "mine")).name == str(tmp_path / "mine")
    with pytest.raises(InputError, match="kind 'step', not 'prefill'"):
        load_pilot(f"prefill:{tmp_path / 'mine'}")
    with pytest.raises(InputError, match=r"up to 32 .* can do 16"):
        load_pilot(str(tmp_path / "mine"), max_block_size=16)
    for spec in (str(tmp_path), f"prefill:{tmp_path / 'none'}"):
        with pytest.raises(InputError, match="no pilot folder"):
            load_pilot(spec)


@pytest.mark.parametrize("spec", ["tree:3@0", "tree:3@x", "tree:3@65", "tree:@4"])
def test_bad_draft_sizes_are_refused(spec: str) -> None:
    with pytest.raises(InputError, match="whole number"):
        load_pilot(spec)


@pytest.mark.parametrize("kind", ["fixed", "tree"])
@pytest.mark.parametrize("argument", ["", "0", "-1", "1.5", "x", "129", "99999999999999999999", "²", " 8"])
def test_bad_sizes_name_the_spec_and_the_limit(kind: str, argument: str) -> None:
    limit = {"fixed": MAX_BLOCK_SIZE, "tree": MAX_TREE_NODES}[kind]
    with pytest.raises(InputError, match=f"from 1 to {limit}") as caught:
        load_pilot(f"{kind}:{argument}")
    assert repr(f"{kind}:{argument}") in str(caught.value)


@pytest.mark.parametrize("spec", ["", "magic", "AR", "ar:3", "auto:1", "step:3", "prefill:", "/no/such/pilot"])
def test_unknown_pilots_are_refused_and_the_known_ones_listed(spec: str) -> None:
    with pytest.raises(InputError, match="known: ar, fixed:B"):
        load_pilot(spec)


@pytest.mark.parametrize(
    "spec", ["x" * 9999, "fixed:" + "9" * 9999, "~nobody/here", "prefill:~nobody/here", "a\0b", "\n"]
)
def test_names_that_are_no_pilots_are_one_short_line(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        load_pilot(spec)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
