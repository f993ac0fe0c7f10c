import json

import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.pilot_choice import PilotChoice, model_name
from blockpilot.pilots.base import Asked, Drafted
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import save_pilot
from blockpilot.pilots.fixed import FixedPilot, PlainPilot
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from blockpilot.pilots.step import StepPilot
from tests.unit.pilots.pieces import make_inputs, sure_draft


def make_choice(spec, **options):
    return PilotChoice(spec, **{"target": "t", "drafter": "d", "costs": StepCosts.linear} | options)


def test_names_become_chains():
    assert make_choice("fixed:4").configured == FixedPilot(4)
    assert make_choice("ar").configured == PlainPilot()
    for spec in ("chain-step", "auto"):
        pilot = make_choice(spec).configured
        assert isinstance(pilot, StepPilot) and pilot.is_chain


@pytest.mark.parametrize("spec", ["tree:7", "step"])
def test_trees_are_refused(spec):
    with pytest.raises(InputError, match="checks chains"):
        make_choice(spec)


def test_an_unknown_pilot_is_noticed_at_once():
    with pytest.raises(InputError, match="no-such"):
        make_choice("no-such")


def test_folders_are_loaded_as_chains(tmp_path):
    save_pilot(
        tmp_path / "step", [StepPilot(Calibration.identity(), StepCosts.linear())], target="t", drafter="d", training={}
    )
    network = PrefillNetwork(PrefillConfig(input_size=5, sizes=(3, 6), hidden_size=4))
    save_pilot(tmp_path / "prefill", PrefillPilot(network), target="t", drafter="d", training={})
    assert make_choice(str(tmp_path / "step")).configured.is_chain
    assert isinstance(make_choice(str(tmp_path / "prefill")).configured, PrefillPilot)
    assert isinstance(make_choice(f"prefill:{tmp_path / 'prefill'}").configured, PrefillPilot)


def test_the_costs_of_the_engine_are_used():
    costs = StepCosts.linear(slope=0.3)
    assert make_choice("chain-step", costs=lambda: costs).configured.costs is costs


def test_requests_may_ask_for_pilots_that_need_no_file(tmp_path):
    choice = make_choice("fixed:4")
    assert choice("fixed:6") == FixedPilot(6) and choice("ar") == PlainPilot()
    assert choice("chain-step") is choice("chain-step")
    assert choice(None) is choice("fixed:4") is choice.configured
    for override in (str(tmp_path), f"prefill:{tmp_path}", "tree:7", "", 4, ["ar"]):
        with pytest.raises(InputError, match="a request may ask for"):
            choice(override)
    for override in ("fixed:x", "fixed:" + "0" * 9 + "4", "fixed:" + "9" * 5000):
        with pytest.raises(InputError, match="whole number") as caught:
            choice(override)
        assert len(str(caught.value)) < 300


def test_the_servers_own_pilot_may_be_named_even_where_it_is_a_folder(tmp_path):
    torch.manual_seed(0)
    network = PrefillNetwork(PrefillConfig(input_size=5, sizes=(3, 6), hidden_size=4))
    save_pilot(tmp_path, PrefillPilot(network), target="t", drafter="d", training={})
    choice = make_choice(str(tmp_path))
    assert choice(str(tmp_path)) is choice.configured


def test_probes_draft_one_size_and_check_another():
    pilot = make_choice("ar")("probe:8:3")
    assert (pilot.block_size, pilot.num_kept) == (8, 3)
    asked = Asked(None, make_inputs())
    draft = sure_draft(0.5, depth=7, width=1)
    (choice,) = pilot.choose([asked])
    assert choice.draft_size == 8
    assert len(pilot.select([Drafted(*asked, choice, draft, 9)])[0].tree) == 1 + 3
    with pytest.raises(InputError, match="probe:B:N"):
        make_choice("ar")("probe:8")


def test_an_exported_folder_is_known_by_its_source(tmp_path):
    assert model_name(str(tmp_path / "some-model")) == "some-model"
    (tmp_path / "blockpilot_export.json").write_text(json.dumps({"source": "smollm2-135m"}))
    assert model_name(str(tmp_path)) == "smollm2-135m"


@pytest.mark.parametrize("spec", ["probe:0:0", "probe:" + "9" * 5000 + ":1", "probe:8", "probe:x:1"])
def test_a_probe_of_no_block_is_refused(spec):
    with pytest.raises(InputError, match="write probe:B:N"):
        make_choice("ar")(spec)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"source": 1}', b"[" * 100_000, b"\xff"])
def test_a_damaged_marker_leaves_the_folders_name(tmp_path, content):
    (tmp_path / "blockpilot_export.json").write_bytes(content)
    assert model_name(str(tmp_path)) == tmp_path.name
