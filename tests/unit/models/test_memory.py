"""What a target needs is told before it is taken."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockpilot.core.device import Placement
from blockpilot.core.errors import InputError
from blockpilot.models import memory
from blockpilot.models.memory import Need, available_bytes, estimate, require_engine_room, require_room, weight_bytes
from blockpilot.models.weights import load_decoder_folder, save_decoder_folder
from tests.tiny import CONFIGS, make_decoder

CPU = torch.device("cpu")
SMOLLM = replace(
    CONFIGS["llama"],
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    is_tied=True,
)


def give(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(num_bytes))


def place(dtype: torch.dtype = torch.float32, *, backend: str = "plain", context_length: int = 8192) -> Placement:
    shape = {"num_slots": 8, "context_length": context_length}
    return Placement(**shape, device=CPU, dtype=dtype, linear_backend=backend)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_weights_are_counted_as_they_are(name: str) -> None:
    decoder = make_decoder(name)
    norms = sum(parameter.numel() for key, parameter in decoder.named_parameters() if "norm" in key)
    found = sum(parameter.numel() for parameter in decoder.parameters())
    assert weight_bytes(decoder.config, torch.float32) == 4 * (found - norms)
    assert weight_bytes(decoder.config, torch.bfloat16) == 2 * (found - norms)


def test_the_default_model_fits_where_it_runs_today(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weight_bytes(SMOLLM, torch.int8) < 0.3e9 and weight_bytes(SMOLLM, torch.float32) < 0.6e9
    give(monkeypatch, 0.5e9)
    monkeypatch.setattr(memory, "_promised_bytes", lambda: 4 * 10**9)
    for placement in (place(backend="int8"), place()):
        require_engine_room(SMOLLM, placement, token_budget=512, name="smollm2")


def test_the_line_names_all_parts() -> None:
    need = estimate(SMOLLM, dtype=torch.bfloat16, num_slots=8, context_length=8192, token_budget=512)
    with pytest.raises(InputError) as caught:
        require_room("smollm2", need, 10**9)
    assert str(caught.value) == (
        "smollm2 needs 1.8 GB (weights 0.3, cache of 8 slots x 8192 tokens 1.5, passes 0.0) and 1.0 GB are free: "
        "lower --context-length, use fewer slots, or a quantized file, or a smaller model"
    )


def test_a_cache_that_the_system_would_not_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 2e9)
    monkeypatch.setattr(memory, "_promised_bytes", lambda: 4 * 10**9)
    with pytest.raises(InputError, match=r"cache of 8 slots x 1000000 tokens 368.7, .*: lower --context-length"):
        require_engine_room(SMOLLM, place(context_length=10**6), token_budget=512, name="smollm2")


def test_a_long_text_that_would_not_fit_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give(monkeypatch, 0.3e9)
    monkeypatch.setattr(memory, "_promised_bytes", lambda: 4 * 10**9)
    with caplog.at_level(logging.WARNING):
        require_engine_room(SMOLLM, place(), token_budget=512, name="smollm2")
    assert [record.message for record in caplog.records] == [
        "smollm2: a text of 8192 tokens would need 0.4 GB and 0.3 GB are free: lower --context-length"
    ]


def test_on_a_gpu_all_of_it_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 1e9)
    placement = replace(place(torch.bfloat16), device=torch.device("cuda"))
    with pytest.raises(InputError, match=r"needs 1.8 GB \(weights 0.3, cache of 8 slots x 8192 tokens 1.5"):
        require_engine_room(SMOLLM, placement, token_budget=512, name="smollm2")
    give(monkeypatch, 1.7e9)
    require_engine_room(SMOLLM, placement, token_budget=512, name="smollm2", is_placed=True)


def test_what_pytorch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert available_bytes(torch.device("cuda")) == 130


def test_weights_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_decoder_folder(make_decoder("llama"), tmp_path)
    give(monkeypatch, 1000)
    monkeypatch.setattr("blockpilot.models.weights.read_floats", lambda *_, **__: pytest.fail("a tensor was read"))
    with pytest.raises(InputError, match=r"needs .* GB \(weights 0.0\) and 0.0 GB are free: use a quantized file"):
        load_decoder_folder(tmp_path, torch.float32)


def test_nothing_fits_into_nothing() -> None:
    require_room("model", Need(weights=5), 5)
    with pytest.raises(InputError):
        require_room("model", Need(weights=5), 4)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Folders that stand for /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapTotal: 0 kB\n")
    return SimpleNamespace(write=write)


def test_the_system_says_what_is_free(machine: SimpleNamespace) -> None:
    assert available_bytes(CPU) == 8000 * 1024


def test_limits_of_groups_count_and_kept_files_do_not(machine: SimpleNamespace) -> None:
    machine.write("proc/self/cgroup", "0::/outer/inner\n")
    machine.write("cgroup/outer/inner/memory.max", "max\n")
    machine.write("cgroup/outer/inner/memory.current", "900\n")
    machine.write("cgroup/outer/memory.max", "5000\n")
    machine.write("cgroup/outer/memory.current", "3000\n")
    machine.write("cgroup/outer/memory.stat", "anon 700\ninactive_file 400\nactive_file 600\n")
    assert available_bytes(CPU) == 5000 - 3000 + 400 + 600


def test_limits_of_older_groups_count(machine: SimpleNamespace) -> None:
    machine.write("proc/self/cgroup", "7:cpu:/a\n5:memory:/box\n")
    machine.write("cgroup/memory/box/memory.limit_in_bytes", "5000\n")
    machine.write("cgroup/memory/box/memory.usage_in_bytes", "6000\n")
    machine.write("cgroup/memory/box/memory.stat", "total_inactive_file 500\n")
    assert available_bytes(CPU) == 0
    machine.write("cgroup/memory/box/memory.usage_in_bytes", "2000\n")
    assert available_bytes(CPU) == 3500


@pytest.mark.parametrize("text", ["", "\n", "0\n", "a:b\n", "0::../../..\n", "\xff"])
def test_odd_groups_are_no_limit(machine: SimpleNamespace, text: str) -> None:
    machine.write("proc/self/cgroup", text)
    assert available_bytes(CPU) == 8000 * 1024


def test_without_any_of_it_the_installed_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert available_bytes(CPU) > 10**8
