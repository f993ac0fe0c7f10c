"""Packed linear layers give what plain ones give."""

import pytest
import torch
from torch import nn

from blockpilot.core.errors import InputError
from blockpilot.models.packing import MkldnnLinear, choose_backend, pack_linear, pack_linears, quantize_linears
from tests.support import decoder_logits
from tests.tiny import ARCHITECTURES, make_decoder

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
    with pytest.raises(InputError, match=r"'magic'; known: auto, blocks, mkldnn, plain"):
        choose_backend("magic", CPU, torch.float32)


def test_a_rounded_layer_multiplies_few_and_many_tokens_by_the_same_numbers() -> None:
    """Else what is drafted would depend on how many tokens share a pass, and no replay could follow it."""
    pytest.importorskip("numba")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 70, bias=False))
    before = layers[0].weight.detach().clone()
    quantize_linears(layers)
    pack_linears(layers, "blocks")
    x = torch.randn(33, 64)
    many = layers(x)
    torch.testing.assert_close(torch.cat([layers(x[i : i + 1]) for i in range(33)]), many, rtol=1e-5, atol=1e-5)
    assert (many - x @ before.T).abs().max() > 1e-4, "nothing was rounded"
