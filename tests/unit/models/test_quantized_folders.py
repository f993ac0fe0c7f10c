"""Hugging Face folders packed to 8 bits: what is kept, when it is made anew, what is refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from blockpilot import LLM, EngineConfig, SamplingParams
from blockpilot.core.errors import InputError
from blockpilot.models import quantized_folders
from blockpilot.models.block_codes import BlockCodes
from blockpilot.models.decoder import Decoder
from blockpilot.models.loading import LoadedTarget, load_target
from blockpilot.models.packing import Int8Linear, pack_linears
from blockpilot.models.quantized_folders import quantize_folder
from blockpilot.models.tensor_files import write_safetensors_folder
from blockpilot.models.weights import save_decoder_folder
from tests.support import decoder_logits, save_reference
from tests.tiny import CODED, make_decoder, make_tokenizer
from tests.unit.models.gguf_files import VOCAB_SIZE, write_gguf


@pytest.fixture(autouse=True)
def cache(model_cache: Path) -> Path:
    return model_cache


def write(folder: Path, name: str = "llama-untied-int8", seed: int = 0) -> Path:
    save_decoder_folder(make_decoder(name, seed), folder)
    make_tokenizer().save(folder)
    return folder


def load(folder: Path, dtype: torch.dtype | None = None) -> LoadedTarget:
    return load_target(str(folder), dtype, quantize="q8_0")


def packed_files(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.glob("quantized/*/*.safetensors")}


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_matrices_become_codes(name: str, dtype: torch.dtype | None, tmp_path: Path, cache: Path) -> None:
    target, floats = load(write(tmp_path / "model", name), dtype), make_decoder(name)
    assert target.dtype == torch.int8 and target.path == tmp_path / "model"
    for place, module in floats.named_modules():
        ours = target.decoder.get_submodule(place)
        if isinstance(module, nn.Linear) and place.endswith("mlp.gate"):
            assert torch.equal(ours.weight, module.weight) and not hasattr(ours, "block_codes")  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            (codes,) = ours.block_codes  # type: ignore[union-attr, misc]
            expected = BlockCodes.quantize_q8_0(module.weight.detach().numpy())
            assert torch.equal(torch.from_numpy(codes.codes), torch.from_numpy(expected.codes))
            assert torch.equal(torch.from_numpy(codes.scales), torch.from_numpy(expected.scales))
        elif isinstance(module, nn.RMSNorm):
            assert torch.equal(ours.weight, module.weight)  # type: ignore[arg-type]
    embedding = floats.embed_tokens.weight.detach()
    if floats.config.is_tied:
        embedding = torch.from_numpy(BlockCodes.quantize_q8_0(embedding.numpy()).dequantize())
    assert torch.equal(target.decoder.embed_tokens.weight, embedding)
    (path,) = packed_files(cache)
    assert path.stat().st_size < 0.7 * (tmp_path / "model" / "model.safetensors").stat().st_size
    assert all(tensor.dtype in (torch.int8, torch.float16, torch.float32) for tensor in load_file(path).values())


def test_what_was_packed_is_read_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model")
    load(folder)
    before = packed_files(cache)
    with monkeypatch.context() as patch:
        patch.setattr(quantized_folders, "_pack", lambda *_: pytest.fail("packed again"))
        load(folder)
    assert len(before) == 1 and packed_files(cache) == before


def test_changed_weights_are_packed_anew(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "model")
    first = quantize_folder(folder, "q8_0")
    write(folder, seed=1)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # whatever the clock says
    second = quantize_folder(folder, "q8_0")
    assert first != second and len(packed_files(cache)) == 2
    expected = BlockCodes.quantize_q8_0(make_decoder("llama-untied-int8", 1).lm_head.weight.detach().numpy())
    (codes,) = load(folder).decoder.lm_head.block_codes  # type: ignore[union-attr, misc]
    assert torch.equal(torch.from_numpy(codes.codes), torch.from_numpy(expected.codes))


def test_what_was_packed_in_part_is_packed_again(tmp_path: Path) -> None:
    """The first of several files, and no index."""
    folder = write(tmp_path / "model")
    place = quantize_folder(folder, "q8_0")
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    assert load(folder).dtype == torch.int8
    names = {path.name for path in quantize_folder(folder, "q8_0").iterdir()}
    assert names == {"model.safetensors", "checksums.json"}


def test_a_damaged_copy_is_made_anew_with_one_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model")
    quantize_folder(folder, "q8_0")
    (path,) = packed_files(cache)
    assert not caplog.records
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    quantize_folder(folder, "q8_0")
    assert path.read_bytes() == content
    quantize_folder(folder, "q8_0")
    assert [record.message.endswith("damaged, and made anew") for record in caplog.records] == [True]


def test_two_folders_of_one_name_are_told_apart(tmp_path: Path, cache: Path) -> None:
    folders = [write(tmp_path / place / "model", seed=seed) for seed, place in enumerate("ab")]
    assert len({quantize_folder(folder, "q8_0") for folder in folders}) == 2 == len(packed_files(cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders(dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = make_decoder("qwen3-int8").to(dtype)
    save_decoder_folder(decoder, tmp_path / "model")
    make_tokenizer().save(tmp_path / "model")
    target = load(tmp_path / "model")
    (codes,) = target.decoder.lm_head.block_codes  # type: ignore[union-attr, misc]
    expected = BlockCodes.quantize_q8_0(decoder.lm_head.weight.detach().float().numpy())
    assert torch.equal(torch.from_numpy(codes.codes), torch.from_numpy(expected.codes))
    assert target.decoder.norm.weight.dtype == torch.float32


def test_folders_in_several_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    whole = load(folder).decoder
    write_safetensors_folder(folder, load_file(folder / "model.safetensors"), max_shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    for decoder in (whole, pieces := load(folder).decoder):
        pack_linears(decoder, "int8")
    x = torch.randn(3, 64)
    assert torch.equal(pieces.lm_head(x), whole.lm_head(x)) and isinstance(pieces.lm_head, Int8Linear)


def test_logits_lie_near_those_of_the_folder(tmp_path: Path) -> None:
    folder, ids = write(tmp_path / "model", "qwen3-int8"), torch.arange(1, 40)
    decoder: Decoder = load(folder).decoder
    pack_linears(decoder, "int8")
    pairs = torch.stack((decoder_logits(decoder, ids), decoder_logits(make_decoder("qwen3-int8"), ids)))
    assert pairs.flatten(1).corrcoef()[0, 1] > 0.98


def test_an_engine_quantizes_as_it_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    settings = {"num_slots": 2, "quantize": "q8_0"}
    llm = LLM(str(folder), drafter="ngram", pilot="fixed:8", config=EngineConfig(**settings))  # type: ignore[arg-type]
    assert llm.config.dtype == "int8" and llm.is_exact
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    drafted = llm.generate("abcabcabc", params, is_raw=True)
    assert drafted.token_ids == llm.generate("abcabcabc", params, pilot="ar", is_raw=True).token_ids


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown format 'q3_k' to quantize to; known: q8_0"):
        load_target(str(write(tmp_path / "model")), None, quantize="q3_k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_dtype_and_a_format_exclude_each_other(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--quantize q8_0 is for dtype int8: leave out --dtype or --quantize"):
        load(write(tmp_path / "model"), dtype)


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", save_reference(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE))
    with pytest.raises(InputError, match=r"packs Hugging Face folders, and tiny.gguf is a GGUF file"):
        load(tmp_path / "tiny.gguf")


def test_shapes_that_do_not_fit_are_refused_before_anything_is_packed(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match=r"model cannot run in dtype int8: its intermediate size 48 is no multiple"):
        load(write(tmp_path / "model", "llama"))
    assert not packed_files(cache)


def test_int8_without_a_format_says_what_to_add(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    with pytest.raises(InputError, match=r"is not stored in codes: add --quantize q8_0, or use --dtype float32"):
        load_target(str(folder), torch.int8)
    assert load_target(str(folder), None).dtype == torch.float32


def test_a_machine_without_kernels_is_told_before_anything_is_packed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKPILOT_CPU", "none")
    with pytest.raises(InputError, match="needs the compiled CPU kernels"):
        load(write(tmp_path / "model"))
    assert not packed_files(cache)
