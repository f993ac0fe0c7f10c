import pytest

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.settings import is_supported, read_pilot
from tests.unit.integrations.vllm.pieces import make_config


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("BLOCKPILOT_PILOT", raising=False)


def test_without_settings_the_plugin_is_off(monkeypatch):
    assert read_pilot(make_config()) is None
    monkeypatch.setenv("BLOCKPILOT_PILOT", " ")
    assert read_pilot(make_config()) is None


def test_the_environment_names_a_pilot(monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_PILOT", "fixed:4")
    assert read_pilot(make_config()) == "fixed:4"


@pytest.mark.parametrize(("given", "wanted"), [("chain-step", "chain-step"), ({"pilot": "ar"}, "ar")])
def test_additional_config_wins_over_the_environment(monkeypatch, given, wanted):
    monkeypatch.setenv("BLOCKPILOT_PILOT", "fixed:4")
    assert read_pilot(make_config(additional_config={"blockpilot": given})) == wanted


@pytest.mark.parametrize("given", [3, {}, {"pilot": 4}, {"pilot": "ar", "size": 4}])
def test_bad_settings_are_named(given):
    with pytest.raises(
        InputError, match="size" if isinstance(given, dict) and "size" in given else "must name a pilot"
    ):
        read_pilot(make_config(additional_config={"blockpilot": given}))


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.32.0", True), ("0.32.3+cpu", True), ("0.31.9", False), ("0.33.0", False), ("1.32.0", False), ("dev", False)],
)
def test_the_first_two_numbers_of_a_version_decide(version, wanted):
    assert is_supported(version) == wanted
