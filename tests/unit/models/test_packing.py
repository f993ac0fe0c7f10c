"""Packed linear layers give what plain ones give."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from blockpilot.core.errors import InputError
from blockpilot.models.packing import (
    Int8Linear,
    MkldnnLinear,
    choose_backend,
    pack_linear,
    pack_linears,
    quantize_linears,
    require_kernels,
    require_packable,
    rows_of,
    why_unpackable,
)
from tests.coded import make_codes
from tests.support import decoder_logits
from tests.tiny import ARCHITECTURES, CODED, CONFIGS, make_decoder

CPU = torch.device("cpu")
needs_mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@needs_mkldnn
@pytest.mark.parametrize("num_rows", [1, 2, 16, 33])
def test_packed_linear_equals_plain(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    layer = nn.Linear(48, 70, bias=False)
    x = torch.randn(num_rows, 48)
    packed = pack_linear(layer, "mkldnn")
    assert isinstance(packed, MkldnnLinear)
    torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)


@needs_mkldnn
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_decoder_equals_plain_and_its_embedding_survives(architecture: str) -> None:
    decoder, packed = make_decoder(architecture), make_decoder(architecture)
    pack_linears(packed, "mkldnn")
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert torch.equal(packed.embed_tokens.weight, decoder.embed_tokens.weight)
    ids = torch.arange(1, 20)
    plain, ours = decoder_logits(decoder, ids), decoder_logits(packed, ids)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


def test_plain_leaves_every_layer_as_it_is() -> None:
    decoder = make_decoder()
    before = list(decoder.modules())
    pack_linears(decoder, "plain")
    assert all(ours is theirs for ours, theirs in zip(decoder.modules(), before, strict=True))


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_what_cannot_be_packed_stays_plain(device: str, dtype: torch.dtype) -> None:
    for requested in ("auto", "mkldnn", "plain"):
        assert choose_backend(requested, torch.device(device), dtype) == "plain"


def test_a_machine_without_the_fast_path_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_backend("mkldnn", CPU, torch.float32) == "plain"


@needs_mkldnn
def test_plain_is_plain_where_the_fast_path_exists() -> None:
    assert choose_backend("mkldnn", CPU, torch.float32) == "mkldnn"
    assert choose_backend("plain", CPU, torch.float32) == "plain"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match=r"'magic'; known: auto, mkldnn, plain"):
        choose_backend("magic", CPU, torch.float32)


@pytest.mark.parametrize("requested", ["auto", "mkldnn", "plain"])
def test_8_bit_integers_have_one_backend(requested: str) -> None:
    assert choose_backend(requested, CPU, torch.int8) == "int8"


def test_a_rounded_layer_multiplies_few_and_many_tokens_alike() -> None:
    """Else what is drafted would depend on how many tokens share a pass."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 70, bias=False))
    before = layers[0].weight.detach().clone()
    quantize_linears(layers)
    pack_linears(layers, "int8")
    assert isinstance(layers[0], Int8Linear)
    x = torch.randn(33, 64)
    many = layers(x)
    assert torch.equal(torch.cat([layers(x[i : i + 1]) for i in range(33)]), many)
    assert torch.equal(layers(x.view(3, 11, 64)), many.view(3, 11, 70))
    assert layers(x[:0]).shape == (0, 70)
    assert 1e-4 < (many - x @ before.T).abs().max() < 0.1, "nothing was rounded, or too much"


def test_parts_of_different_forms_are_one_layer() -> None:
    weights = [torch.randn(rows, 64) for rows in (16, 24, 7)]
    parts = [make_codes(weight, form) for weight, form in zip(weights, ("nibbles", "bytes", "halves"), strict=True)]
    layer, x = Int8Linear(parts, require_kernels()), torch.randn(5, 64)
    assert (layer.in_features, layer.out_features) == (64, 47)
    alone = [Int8Linear([part], require_kernels())(x) for part in parts]
    assert torch.equal(layer(x), torch.cat(alone, dim=-1))


def test_layers_without_codes_stay_as_they_are() -> None:
    """Routers, and what fits into no block: their sums are float32."""
    decoder = make_decoder("qwen3_moe-int8")
    pack_linears(decoder, "int8")
    left = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    assert left == ["layers.0.mlp.gate", "layers.2.mlp.gate"]  # layer 1 is dense
    odd = nn.Sequential(nn.Linear(33, 8, bias=False))
    quantize_linears(odd)
    assert not hasattr(odd[0], "block_codes")


def test_some_rows_of_a_layer_with_codes_and_no_values() -> None:
    """What a drafter with few tokens of its own looks at."""
    layer, ids = nn.Linear(64, 70, bias=False, device="meta"), torch.tensor([69, 3, 40])
    layer.block_codes = (make_codes(torch.randn(70, 64), "nibbles"),)  # type: ignore[assignment]
    x = torch.randn(4, 64)
    assert torch.equal(pack_linear(rows_of(layer, ids), "int8")(x), pack_linear(layer, "int8")(x)[:, ids])


def test_shapes_that_fit_and_why_others_do_not() -> None:
    config = CONFIGS["qwen3_moe-int8"]
    moe = config.moe
    assert moe is not None
    assert all(why_unpackable(CONFIGS[name]) is None for name in CODED)
    wrong = {
        "its hidden size 72 is no multiple of 32": replace(config, hidden_size=72),
        "its width of attention 48 is no multiple of 32": replace(config, num_heads=3, num_kv_heads=1),
        "its intermediate size 100 is no multiple of 32": replace(config, intermediate_size=100),
        "its intermediate size of experts 24 is no multiple of 32": replace(
            config, moe=replace(moe, intermediate_size=24)
        ),
        "its heads have 8 numbers, and only multiples of 16 up to 256 are supported": replace(config, head_dim=8),
        "its heads have 512 numbers": replace(config, head_dim=512),
        "it has more than 200 layers": replace(config, num_layers=201),
    }
    for reason, one in wrong.items():
        assert (why_unpackable(one) or "").startswith(reason)
        with pytest.raises(InputError, match=rf"^big cannot run in dtype int8: {reason}.*; use --dtype float32$"):
            require_packable(one, "big")
    no_dense = replace(config, intermediate_size=100, moe=replace(moe, dense_layers=()))
    assert why_unpackable(no_dense) is None, "a size of layers that there are none of"


def test_without_kernels_float32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPILOT_CPU", "none")
    with pytest.raises(InputError, match=r"dtype int8 needs the compiled CPU kernels.*use --dtype float32"):
        require_kernels()
