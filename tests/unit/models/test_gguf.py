from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.models.block_codes import BlockCodes
from blockpilot.models.decoder import Decoder
from blockpilot.models.gguf import load_decoder_gguf
from blockpilot.models.packing import pack_linears
from tests.support import decoder_logits, reference_logits, save_reference
from tests.tiny import make_placement
from tests.unit.models.gguf_files import VOCAB_SIZE, write_gguf

TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1))
SHAPES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}
QWEN2 = {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
QWEN = {"head_dim": 32, "tie_word_embeddings": True}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def reference(tmp_path: Path, kind: str = "llama", **options: Any) -> Any:
    return save_reference(tmp_path / "reference", kind, **(SHAPES | options))


def check_logits(path: Path, model: Any) -> None:
    decoder, _, _ = load_decoder_gguf(path, torch.float32)
    assert (decoder_logits(decoder, TOKEN_IDS) - reference_logits(model, TOKEN_IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_matches_the_dequantized_reference(tmp_path: Path, quantization: str, is_tied: bool) -> None:
    model = reference(tmp_path, tie_word_embeddings=is_tied)
    stored = write_gguf(tmp_path / "tiny.gguf", model, kind=quantization)
    model.load_state_dict(stored, strict=not is_tied)
    check_logits(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen2", QWEN2), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", QWEN), ("qwen3_moe", MOE)],
)
def test_qwen(tmp_path: Path, kind: str, options: dict[str, Any], quantization: str) -> None:
    model = reference(tmp_path, kind, **options)
    check_logits(write(tmp_path, model, quantization), model)


def write(tmp_path: Path, model: Any, quantization: str) -> Path:
    """The model as a file; its own weights become those of the file."""
    stored = write_gguf(tmp_path / "tiny.gguf", model, kind=quantization)
    model.save_pretrained(tmp_path / "stored", state_dict=stored)
    loaded = type(model).from_pretrained(tmp_path / "stored")
    model.load_state_dict(loaded.state_dict())
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "Q4_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", QWEN2), ("qwen3", QWEN), ("qwen3_moe", MOE)],
)
def test_integers_run_as_they_are_stored(tmp_path: Path, kind: str, options: dict[str, Any], quantization: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", reference(tmp_path, kind, **options), kind=quantization)
    floats, _, _ = load_decoder_gguf(tmp_path / "tiny.gguf", torch.float32)
    decoder, _, dtype = load_decoder_gguf(tmp_path / "tiny.gguf", None)
    assert dtype == torch.int8 and all_codes(decoder).keys() == coded_names(floats)
    for name, parts in all_codes(decoder).items():
        values = np.concatenate([part.dequantize() for part in parts])
        assert torch.equal(torch.from_numpy(values), floats.get_parameter(f"{name}.weight"))
    for name, parameter in decoder.named_parameters():
        assert parameter.is_meta == (name.removesuffix(".weight") in all_codes(decoder))
        assert parameter.is_meta or torch.equal(parameter, floats.get_parameter(name))


def test_matrices_that_run_together_may_be_stored_in_different_forms(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference(tmp_path), kind="Q4_1", kinds={"v_proj": "Q8_0", "up_proj": "Q5_0"})
    floats, decoder = (load_decoder_gguf(path, dtype)[0] for dtype in (torch.float32, None))
    codes = all_codes(decoder)
    assert [len(part.codes) for part in codes["layers.0.self_attn.qkv_proj"]] == [64, 32, 32]
    assert [len(part.codes) for part in codes["layers.1.mlp.gate_up_proj"]] == [96, 96]
    for name in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"):
        values = np.concatenate([part.dequantize() for part in codes[name]])
        assert torch.equal(torch.from_numpy(values), floats.get_parameter(f"{name}.weight"))


def all_codes(decoder: Decoder) -> dict[str, tuple[BlockCodes, ...]]:
    found = {name: getattr(module, "block_codes", None) for name, module in decoder.named_modules()}
    return {name: parts for name, parts in found.items() if parts is not None}


def coded_names(decoder: Decoder) -> set[str]:
    linears = {name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    return {name for name in linears if not name.endswith("mlp.gate")}


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("qwen2", QWEN2), ("qwen3", QWEN), ("qwen3_moe", MOE)])
def test_passes_in_integers_lie_near_the_reference(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Rows in llama.cpp's order, heads, rotation, experts."""
    model = reference(tmp_path, kind, **options)
    decoder, _, _ = load_decoder_gguf(write(tmp_path, model, "Q8_0"), torch.int8)
    pack_linears(decoder, "int8")
    runner = CpuTargetRunner(decoder, make_placement(1, 200, "int8"))
    tree = DraftTree.chain(int(TOKEN_IDS[0]), TOKEN_IDS[1:].tolist())
    found = runner.verify([(runner.cache.reserve(), tree)], ()).logits
    pairs = torch.stack((found.flatten(), reference_logits(model, TOKEN_IDS).flatten()))
    assert pairs.corrcoef()[0, 1] > 0.99


def test_what_is_not_stored_as_integers_runs_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    for quantization in ("F32", "F16", "BF16"):
        write_gguf(path, reference(tmp_path), kind=quantization)
        assert load_decoder_gguf(path, None)[2] == torch.float32
        with pytest.raises(InputError, match=rf"attn_q.weight has type {quantization}, which does not run in int8"):
            load_decoder_gguf(path, torch.int8)
    write_gguf(path, reference(tmp_path), kind="Q8_0")
    for dtype in (torch.float32, torch.bfloat16):
        assert load_decoder_gguf(path, dtype)[2] == dtype
    monkeypatch.setenv("BLOCKPILOT_CPU", "none")
    assert load_decoder_gguf(path, None)[2] == torch.float32


def test_shapes_that_do_not_fit_run_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference(tmp_path, "qwen3", head_dim=8), kind="Q8_0")
    assert load_decoder_gguf(path, None)[2] == torch.float32
    with pytest.raises(InputError, match=r"tiny.gguf cannot run in dtype int8: its heads have 8 numbers"):
        load_decoder_gguf(path, torch.int8)


def test_tokenizer_and_configuration_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", reference(tmp_path))
    decoder, tokenizer, _ = load_decoder_gguf(tmp_path / "tiny.gguf", torch.bfloat16)
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert decoder.config.eos_token_ids == tokenizer.eos_token_ids == (2,)
    assert tokenizer.chat_template is not None
    assert tokenizer.context_length == decoder.config.context_length == 256
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    # at base 1e6 the slowest of eight frequencies turns less than once in 8192 positions
    rope = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    model = reference(tmp_path, rope_parameters=rope)
    plain = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).float()
    assert factors.max() > 7.9
    write_gguf(tmp_path / "tiny.gguf", model, extra={"rope_freqs.weight": factors})
    decoder, _, _ = load_decoder_gguf(tmp_path / "tiny.gguf", torch.float32)
    assert (decoder.config.rope.kind, decoder.config.rope.factor) == ("llama3", 8.0)
    check_logits(tmp_path / "tiny.gguf", model)


def test_unknown_factors_are_refused_and_ones_mean_nothing(tmp_path: Path) -> None:
    model = reference(tmp_path)
    write_gguf(tmp_path / "odd.gguf", model, extra={"rope_freqs.weight": torch.linspace(1, 3, 8)})
    with pytest.raises(InputError, match="follows no known scaling"):
        load_decoder_gguf(tmp_path / "odd.gguf", torch.float32)
    write_gguf(tmp_path / "short.gguf", model, extra={"rope_freqs.weight": torch.ones(3)})
    with pytest.raises(InputError, match="has 3 values, expected 8"):
        load_decoder_gguf(tmp_path / "short.gguf", torch.float32)
    write_gguf(tmp_path / "ones.gguf", model, extra={"rope_freqs.weight": torch.ones(8)})
    check_logits(tmp_path / "ones.gguf", model)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", reference(tmp_path), extra={"blk.0.attn_q.bias": torch.ones(64)})
    with pytest.raises(InputError, match=r"unexpected tensors: blk\.0\.attn_q\.bias"):
        load_decoder_gguf(tmp_path / "tiny.gguf", torch.float32)


@pytest.mark.parametrize("share", [0.00005, 0.001, 0.02, 0.05, 0.3, 0.999])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference(tmp_path))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match="truncated"):
        load_decoder_gguf(path, torch.float32)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(InputError, match="not a GGUF file"):
        load_decoder_gguf(tmp_path / "page.gguf", torch.float32)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(InputError, match="not a GGUF file"):
        load_decoder_gguf(tmp_path / "empty.gguf", torch.float32)
    with pytest.raises(InputError, match="cannot read"):
        load_decoder_gguf(tmp_path / "absent.gguf", torch.float32)
