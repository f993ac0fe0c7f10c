import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from blockpilot.integrations.vllm import plugin
from tests.unit.integrations.vllm.pieces import make_config

ASYNC = SimpleNamespace(async_scheduling=True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("BLOCKPILOT_PILOT", raising=False)


def make_class():
    class Engine:
        def __init__(self, vllm_config, *, size=1):
            self.vllm_config, self.size = vllm_config, size

    return Engine


@pytest.fixture
def fake_vllm(monkeypatch):
    """A vLLM of any version, with the three classes that the plugin hooks and no Triton."""

    def install(version):
        owners = {"Scheduler": make_class(), "PrometheusStatLogger": make_class(), "GPUModelRunner": make_class()}
        content = {
            "vllm": {},
            "vllm.version": {"__version__": version},
            "vllm.triton_utils": {"HAS_TRITON": False},
            "vllm.v1.core.sched.scheduler": {"Scheduler": owners["Scheduler"]},
            "vllm.v1.metrics.loggers": {"PrometheusStatLogger": owners["PrometheusStatLogger"]},
            "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": owners["GPUModelRunner"]},
        }
        for name, values in content.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        for name in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.metrics", "vllm.v1.worker"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return owners

    return install


def test_registering_twice_hooks_once(fake_vllm):
    owners = fake_vllm("0.32.1")
    before = [owner.__init__ for owner in owners.values()]
    plugin.register()
    hooked = [owner.__init__ for owner in owners.values()]
    assert all(new is not old for new, old in zip(hooked, before, strict=True))
    plugin.register()
    assert [owner.__init__ for owner in owners.values()] == hooked


@pytest.mark.parametrize(("pilot", "num_warnings"), [("chain-step", 1), ("", 0)])
def test_an_unsupported_version_is_left_alone_with_one_warning(fake_vllm, monkeypatch, caplog, pilot, num_warnings):
    owners = fake_vllm("0.33.0")
    before = [owner.__init__ for owner in owners.values()]
    monkeypatch.setenv("BLOCKPILOT_PILOT", pilot)
    plugin.register()
    assert [owner.__init__ for owner in owners.values()] == before
    assert len(caplog.records) == num_warnings
    assert all("0.33.0" in record.message and ">=0.32,<0.33" in record.message for record in caplog.records)


def test_objects_without_a_pilot_stay_as_vllm_made_them():
    owner, attached = make_class(), []
    plugin.hook_constructor(owner, lambda made, settings: attached.append((made, settings)))
    made = owner(make_config(), size=3)
    assert made.size == 3 and not attached
    piloted = owner(make_config(additional_config={"blockpilot": "ar"}))
    assert attached == [(piloted, "ar")]


def test_a_failure_of_ours_does_not_stop_vllm(caplog):
    owner = make_class()

    def attach(made, settings):
        raise RuntimeError("broken on purpose")

    plugin.hook_constructor(owner, attach)
    assert owner(make_config(additional_config={"blockpilot": "ar"}), size=2).size == 2
    assert owner(make_config(additional_config={"blockpilot": 7})).size == 1  # settings that cannot be read
    assert ["broken on purpose" in record.message for record in caplog.records] == [True, False]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative_config": None}, "DFlash"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "DFlash"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"scheduler_config": ASYNC}, "--no-async-scheduling"),
    ],
)
def test_engines_that_cannot_be_piloted_are_told_why(options, reason, caplog):
    """Once, by the scheduler: the hooked model runner is not built where another one serves."""
    engine = SimpleNamespace(vllm_config=make_config(**options), drafter=SimpleNamespace())
    before = dict(vars(engine))
    plugin.attach_runner(engine, "ar")
    assert not caplog.records
    plugin.attach_scheduler(engine, "ar")
    assert vars(engine) == before and reason in caplog.text and len(caplog.records) == 1


def test_pipeline_stages_without_a_drafter_stay(caplog):
    caplog.set_level(logging.INFO)
    runner = SimpleNamespace(vllm_config=make_config())
    plugin.attach_runner(runner, "ar")
    assert set(vars(runner)) == {"vllm_config"} and not caplog.records
