"""Hostile and damaged model files are refused at once, in one line, before anything is made of them."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import parse_decoder_config
from blockpilot.models.dflash_format import dflash_names, parse_dflash_config
from blockpilot.models.eagle3_format import parse_eagle3_config
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.gguf_file import read_gguf
from blockpilot.models.loading import load_drafter, load_target
from blockpilot.models.quantized_folders import quantize_folder
from blockpilot.models.tensor_files import INDEX_FILE, SINGLE_FILE, read_safetensors_folder, write_safetensors_folder
from blockpilot.models.weights import decoder_names, load_decoder_folder, save_decoder_folder
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields, save_reference
from tests.tiny import make_decoder
from tests.unit.models.gguf_files import VOCAB_SIZE, write_gguf
from tests.unit.models.hostile import (
    CONFIGS,
    DFLASH,
    EAGLE3,
    GGUF_FILES,
    LLAMA,
    MOE,
    SAFETENSORS_FILES,
    SPECULATORS,
    STRING,
    TOKENIZER_FILES,
    WEIGHT_MAPS,
    array,
    gguf_bytes,
    model_fields,
    safetensors_bytes,
    string,
    tensor,
    with_odd_values,
)

MOST_SECONDS, MOST_MEGABYTES = 1.0, 200
_PROBE = """
import sys, time
from pathlib import Path
from blockpilot.core.errors import InputError
from blockpilot.models.gguf import load_decoder_gguf
import gguf
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
for path in map(Path, sys.argv[1:]):
    before, start = peak(), time.process_time()
    try:
        load_decoder_gguf(path, None)
    except InputError:
        print(time.process_time() - start, peak() - before)
"""


def parse(raw: dict[str, Any]) -> object:
    """As the architecture that the configuration names."""
    if raw.get("speculators_model_type") or "dflash_config" in raw:
        return parse_dflash_config(raw, "config.json")
    if "eagle_config" in raw:
        return parse_eagle3_config(raw, "config.json", num_target_layers=8)
    return parse_decoder_config(raw, "config.json")


def check_line(error: InputError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("case", GGUF_FILES)
def test_gguf_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = GGUF_FILES[case]
    (tmp_path / "hostile.gguf").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_decoder_gguf(tmp_path / "hostile.gguf", None)
    check_line(caught.value)


def test_the_header_that_they_change_is_right(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes(list(model_fields().values())))
    assert read_gguf(tmp_path / "tiny.gguf").fields["llama.attention.head_count"] == 4
    with pytest.raises(InputError, match="2 layers and experts, but only 0 tensors"):
        load_decoder_gguf(tmp_path / "tiny.gguf", None)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell a process's peak")
def test_a_refusal_takes_little_time_and_memory(tmp_path: Path) -> None:
    """A bound on work, not a benchmark: what is made of a file before it is refused."""
    large = {  # files that hold what they promise, as far as bounds let them
        "texts": gguf_bytes([array("a", STRING, [bytes(8)], 2**20)], num_fields=2, data=bytes(40 << 20)),
        "numbers": gguf_bytes([array("a", 10, [b"\xff" * 8] * 2**21)]),
        "fields": gguf_bytes([string(f"{index}", "") for index in range(2**14)]),
        "tensors": gguf_bytes([], [tensor(f"{index}", (2**60, 1, 1, 1)) for index in range(2**15)]),
        "zeros": gguf_bytes(num_tensors=2**15, num_fields=2**14, data=bytes(40 << 20)),
    }
    for name, content in ({key: content for key, (content, _) in GGUF_FILES.items()} | large).items():
        (tmp_path / f"{name.replace(' ', '-')}.gguf").write_bytes(content)
    paths = sorted(tmp_path.glob("*.gguf"))
    found = subprocess.run([sys.executable, "-c", _PROBE, *map(str, paths)], capture_output=True, text=True, check=True)
    rows = [tuple(map(float, line.split())) for line in found.stdout.splitlines()]
    assert len(rows) == len(paths)
    assert max(seconds for seconds, _ in rows) < MOST_SECONDS
    assert sum(megabytes for _, megabytes in rows) < MOST_MEGABYTES


def test_gguf_files_with_changed_bytes_load_or_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, save_reference(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE))
    content, rng = path.read_bytes(), random.Random(0)
    header = len(content) - 4 * sum(tensor.data.size for tensor in read_gguf(path).tensors.values())
    for _ in range(300):
        changed = bytearray(content)
        start = rng.randrange(header)
        others = rng.randbytes(1), bytes(8), b"\xff" * 8, rng.randbytes(rng.randrange(9))
        changed[start : start + 8] = rng.choice(others)
        path.write_bytes(changed)
        try:
            load_decoder_gguf(path, None)
        except InputError as error:
            check_line(error)


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_are_refused(case: str) -> None:
    raw, changes, message = CONFIGS[case]
    parse(raw)
    with pytest.raises(InputError, match=f"config.json.*{message}") as caught:
        parse(raw | changes)
    check_line(caught.value)


@pytest.mark.parametrize("raw", [LLAMA, MOE, DFLASH, SPECULATORS, EAGLE3], ids=lambda raw: str(raw["architectures"][0]))
def test_configurations_with_odd_values_are_read_or_refused(raw: dict[str, Any]) -> None:
    for changed in with_odd_values(raw):
        try:
            parse(changed)
        except InputError as error:
            check_line(error)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1024}, {"num_hidden_layers": 16, "num_experts": 4096}])
def test_names_are_not_listed_for_layers_that_are_not_stored(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference(tmp_path, "qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_experts": 6} | change))
    monkeypatch.setattr("blockpilot.models.weights.decoder_names", lambda config: pytest.fail("names were listed"))
    with pytest.raises(InputError, match=r"layers and experts, but only \d+ tensors"):
        load_decoder_folder(tmp_path, torch.float32)


def test_a_drafter_of_many_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DFLASH | {"num_hidden_layers": 1000}))
    write_safetensors_folder(tmp_path, {"norm.weight": torch.ones(32)})
    monkeypatch.setattr("blockpilot.models.dflash_format.dflash_names", lambda config: pytest.fail("names were listed"))
    with pytest.raises(InputError, match="1000 layers and experts, but only 1 tensors"):
        load_drafter(str(tmp_path), torch.float32)


def test_the_largest_tables_of_names_are_made_in_a_moment() -> None:
    start = time.perf_counter()
    decoder_names(parse_decoder_config(MOE | {"num_hidden_layers": 1024, "num_experts": 64}, "here"))
    dflash_names(parse_dflash_config(DFLASH | {"num_hidden_layers": 1024}, "here"))
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("case", TOKENIZER_FILES)
def test_files_of_a_tokenizer_are_refused(case: str, tmp_path: Path) -> None:
    name, content, message = TOKENIZER_FILES[case]
    Tokenizer.from_gguf(byte_vocabulary_fields(), "test.gguf").save(tmp_path)
    Tokenizer.from_folder(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    check_line(caught.value)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", vocab_size=VOCAB_SIZE)
    Tokenizer.from_gguf(byte_vocabulary_fields(num_tokens=VOCAB_SIZE), "test.gguf").save(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["vocab"]["hello"] = 10**6
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=f"1000001 tokens, the model only {VOCAB_SIZE}; they do not belong together"):
        load_target(str(tmp_path), torch.float32)


@pytest.mark.parametrize("case", WEIGHT_MAPS)
def test_indices_of_weights_are_refused(case: str, tmp_path: Path) -> None:
    content, message = WEIGHT_MAPS[case]
    write_safetensors_folder(tmp_path, {"a": torch.ones(1)})
    write_safetensors_folder(tmp_path / "x", {"a": torch.ones(1)})
    (tmp_path / INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        read_safetensors_folder(tmp_path)
    check_line(caught.value)


@pytest.mark.parametrize("case", SAFETENSORS_FILES)
def test_safetensors_files_are_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(SAFETENSORS_FILES[case])
    with pytest.raises(InputError, match=r"model\.safetensors") as caught:
        read_safetensors_folder(tmp_path)
    check_line(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    tensors: dict[str, Tensor] = dict(read_safetensors_folder(tmp_path))
    write_safetensors_folder(tmp_path, tensors | {"model.norm.weight": torch.ones(32).to(dtype)})
    with pytest.raises(InputError, match=rf"model\.norm\.weight is {dtype}, expected floating point"):
        load_decoder_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "U16", "I64"])
def test_weights_are_not_quantized_unless_they_are_real_numbers(kind: str, tmp_path: Path, model_cache: Path) -> None:
    save_decoder_folder(make_decoder("llama-int8"), tmp_path)
    bits = int(kind[1:].partition("_")[0])
    entries, start = {}, 0
    for name, stored in read_safetensors_folder(tmp_path).items():
        end = start + stored.numel() * bits // 8
        entries[name] = {"dtype": kind, "shape": list(stored.shape), "data_offsets": [start, end]}
        start = end
    (tmp_path / SINGLE_FILE).write_bytes(safetensors_bytes(json.dumps(entries).encode(), data=bytes(start)))
    for read in (lambda: load_decoder_folder(tmp_path, torch.float32), lambda: quantize_folder(tmp_path, "q8_0")):
        with pytest.raises(InputError, match=r"cannot be read|expected floating point"):
            read()


def test_misshapen_weights_are_not_quantized(tmp_path: Path, model_cache: Path) -> None:
    save_decoder_folder(make_decoder("llama-int8"), tmp_path)
    tensors: dict[str, Tensor] = dict(read_safetensors_folder(tmp_path))
    write_safetensors_folder(tmp_path, tensors | {"model.layers.0.self_attn.o_proj.weight": torch.ones(64, 48)})
    with pytest.raises(InputError, match=r"o_proj\.weight has shape \[64, 48\], expected \[64, 64\]"):
        quantize_folder(tmp_path, "q8_0")


def test_configurations_without_an_end_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (17 << 20))
    with pytest.raises(InputError, match="larger than 16 MB"):
        load_decoder_folder(tmp_path, torch.float32)
