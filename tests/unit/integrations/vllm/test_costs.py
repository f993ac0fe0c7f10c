import pytest

from blockpilot.integrations.vllm.costs import ASSUMED, costs_key, costs_path, find_costs, remember_costs
from blockpilot.pilots.cost_model import StepCosts
from tests.unit.integrations.vllm.pieces import make_config


def make_key(**options):
    return costs_key(make_config(**options), version="0.32.0", device="some GPU")


def test_costs_are_found_by_what_they_depend_on(model_cache, caplog):
    costs = StepCosts.linear(slope=0.3)
    path = remember_costs(costs, make_key())
    assert path == costs_path(make_key()) and path.is_relative_to(model_cache)
    assert find_costs(make_key()) == costs and not caplog.records


def test_other_engines_do_not_find_them(model_cache):
    paths = {costs_path(make_key()), costs_path(costs_key(make_config(), version="0.32.1", device="some GPU"))}
    paths.add(costs_path(costs_key(make_config(), version="0.32.0", device="cpu")))
    config = make_config()
    config.parallel_config.tensor_parallel_size = 2
    paths.add(costs_path(costs_key(config, version="0.32.0", device="some GPU")))
    assert len(paths) == 4


@pytest.mark.parametrize(
    "text", [None, "{", '{"draft": []}', "[]", "[" * 100_000, '{"key": NaN}', '{"draft": 1, "verify": 1}']
)
def test_without_costs_some_are_assumed_and_that_is_said(model_cache, caplog, text):
    path = costs_path(make_key())
    if text is not None:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert find_costs(make_key()) is ASSUMED
    assert len(caplog.records) == 1
    assert ("profile --engine vllm" if text is None else path.name) in caplog.text
