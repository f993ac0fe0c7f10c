from pathlib import Path

import pytest

from blockpilot.core.config import EngineConfig, cache_dir, default_dtype, device_type
from blockpilot.core.errors import InputError


def test_cache_dir_prefers_our_own_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BLOCKPILOT_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "blockpilot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "blockpilot"


def test_cache_dir_expands_the_home_folder(monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("BLOCKPILOT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(InputError, match="set BLOCKPILOT_CACHE"):
        cache_dir()


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.num_slots = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("token_budget", 0),
        ("context_length", 1),
        ("context_length", -5),
        ("dtype", "int3"),
        ("device", "mps"),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InputError, match=field):
        EngineConfig(**{field: value})


def test_8_bit_integers_run_on_a_cpu():
    assert EngineConfig(dtype="int8").dtype == "int8"
    with pytest.raises(InputError, match=r"dtype int8 runs on a CPU: use bfloat16 on a GPU"):
        EngineConfig(device="cuda", dtype="int8")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "auto"), ("cuda", "bfloat16"), ("cuda:1", "bfloat16")])
def test_the_target_settles_what_a_cpu_runs_in(device, dtype):
    assert EngineConfig(device=device).dtype == dtype


def test_unknown_keys_are_an_error_that_names_the_key():
    with pytest.raises(TypeError, match="num_slotz"):
        EngineConfig(num_slotz=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("cpu", "cpu", "float32"),
        ("cpu:0", "cpu", "float32"),
        ("cuda", "cuda", "bfloat16"),
        ("cuda:1", "cuda", "bfloat16"),
    ],
)
def test_a_device_has_a_type_and_a_usual_dtype(name, kind, dtype):
    assert (device_type(name), default_dtype(name)) == (kind, dtype)


@pytest.mark.parametrize("name", ["", "tpu", "mps", "meta", "xpu:0", "CUDA", "cuda:", "cuda:x", "cuda:01", "cudax"])
def test_other_devices_are_named(name):
    with pytest.raises(InputError, match=f"unknown device '{name}': use cpu or cuda"):
        device_type(name)
