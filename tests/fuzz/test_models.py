"""Random model files: GGUF, safetensors, configurations and tokenizers. They load, or are refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from blockpilot.models.config import parse_decoder_config
from blockpilot.models.dflash_format import parse_dflash_config
from blockpilot.models.eagle3_format import parse_eagle3_config
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.loading import load_drafter, load_target, resolve_folder, save_drafter
from blockpilot.models.tensor_files import read_safetensors_folder
from tests.fuzz.damage import damage_file
from tests.fuzz.mutations import change_bytes, change_safetensors, change_value, odd_gguf
from tests.fuzz.profiles import SOURCES, fuzz, refuses
from tests.fuzz.world import good_gguf
from tests.tiny import make_dflash, make_eagle3
from tests.unit.models.hostile import DFLASH, EAGLE3, LLAMA, MOE, SPECULATORS, model_fields
from tests.unit.training.pieces import save_target

PARSERS: dict[str, tuple[dict[str, Any], Callable[..., object]]] = {
    "llama": (LLAMA, parse_decoder_config),
    "experts": (MOE, parse_decoder_config),
    "dflash": (DFLASH, parse_dflash_config),
    "speculators": (SPECULATORS, parse_dflash_config),
    "eagle3": (EAGLE3, lambda raw, where: parse_eagle3_config(raw, where, num_target_layers=8)),
}
NAMES = ("x" * 5000, "~no-one/x", "a\0b", "d/" * 3000, "n" * 300, "/dev/null/x")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_target(folder / "target")
    save_drafter(make_dflash(is_second=True), folder / "dflash")
    save_drafter(make_eagle3(), folder / "eagle3")
    return folder


def copy(source: Path, name: str) -> Path:
    place = source.parent / f"{name}-copy"
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(source, place))


def test_the_good_file_loads(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(good_gguf())
    assert not refuses(lambda: load_decoder_gguf(tmp_path / "tiny.gguf", None))


@fuzz(SOURCES)
def test_gguf_files(tmp_path: Path, random: Random) -> None:
    fields = model_fields()
    data = odd_gguf(fields, random) if random.random() < 0.5 else change_bytes(good_gguf(), random)
    (tmp_path / "odd.gguf").write_bytes(data)
    refuses(lambda: load_decoder_gguf(tmp_path / "odd.gguf", None))


@fuzz(SOURCES)
def test_safetensors_files(models: Path, random: Random) -> None:
    folder = copy(models / "target", "safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(change_safetensors(path.read_bytes(), random))
    refuses(lambda: {name: tensor.shape for name, tensor in read_safetensors_folder(folder).items()})
    refuses(lambda: load_target(str(folder), None))


@pytest.mark.parametrize("kind", PARSERS)
@fuzz(SOURCES)
def test_configurations(kind: str, random: Random) -> None:
    good, parse = PARSERS[kind]
    raw = json.loads(json.dumps(change_value(good, random)))
    if isinstance(raw, dict):
        refuses(lambda: parse(raw, "config.json"))


@fuzz(SOURCES)
def test_folders_of_targets(models: Path, random: Random) -> None:
    folder = copy(models / "target", "random")
    damage_file(random.choice(sorted(folder.iterdir())), [models / "dflash" / "config.json"], random)
    refuses(lambda: load_target(str(folder), None).tokenizer.encode("what is it"))


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
@fuzz(SOURCES)
def test_folders_of_drafters(models: Path, kind: str, random: Random) -> None:
    import torch

    folder = copy(models / kind, "drafter")
    damage_file(random.choice(sorted(folder.iterdir())), [models / "target" / "config.json"], random)
    refuses(lambda: load_drafter(str(folder), torch.float32, num_target_layers=3))


@pytest.mark.parametrize("name", NAMES)
def test_names_that_no_model_has_are_refused(name: str) -> None:
    assert refuses(lambda: load_target(name, None))
    assert refuses(lambda: resolve_folder(name))
