"""Codes must hold exactly the dequantized weights, and multiplying from them must give the float32 result."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from torch import nn

from blockpilot.models.block_codes import BlockCodes, BlockLinear, compile_kernels, decode_blocks
from blockpilot.models.packing import MkldnnLinear, choose_backend, pack_linear

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


def random_weight(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)


def make_codes(kind: str, rows: int = 100, columns: int = 96) -> tuple[BlockCodes, np.ndarray]:
    raw = quantize(random_weight(rows, columns), gguf.GGMLQuantizationType[kind])
    codes = decode_blocks(raw, kind)
    assert codes is not None
    return codes, gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_codes_hold_the_dequantized_weights(kind: str) -> None:
    codes, expected = make_codes(kind)
    np.testing.assert_allclose(codes.dequantize(), expected, rtol=0, atol=1e-6)


def test_other_kinds_have_no_codes() -> None:
    assert decode_blocks(random_weight(4, 32).view(np.uint8), "F32") is None


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 20])
def test_product_equals_float32(kind: str, num_tokens: int, num_threads: int) -> None:
    codes, weight = make_codes(kind)
    linear = nn.Linear(96, 100, bias=False)
    linear.weight = nn.Parameter(torch.from_numpy(weight))
    packed = BlockLinear(codes, linear, num_threads)
    x = torch.from_numpy(random_weight(num_tokens, 96))
    exact = x.double() @ linear.weight.detach().double().T
    rounding = 1e-6 * (x.double().abs() @ linear.weight.detach().double().abs().T)  # a few units of float32
    assert bool(((packed(x).double() - exact).abs() <= rounding).all())


def test_layers_with_codes_run_from_them() -> None:
    linear = nn.Linear(96, 100, bias=False)
    linear.block_codes = make_codes("Q4_1")[0]
    assert isinstance(pack_linear(linear, "blocks"), BlockLinear)
    assert isinstance(pack_linear(linear, "mkldnn"), MkldnnLinear)


def test_joined_parts_and_chosen_rows() -> None:
    first, second = make_codes("Q4_1", rows=64)[0], make_codes("Q8_0", rows=70)[0]
    joined = BlockCodes.join([first, second])
    np.testing.assert_array_equal(joined.dequantize()[64:], second.dequantize())
    order = np.array([5, 3, 100])
    np.testing.assert_array_equal(joined.rows(order).dequantize(), joined.dequantize()[order])


def test_layers_without_codes_are_packed_in_float32() -> None:
    assert isinstance(pack_linear(nn.Linear(32, 32, bias=False), "blocks"), MkldnnLinear)


def test_backend_falls_back_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "mkldnn"
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "plain"


def test_compiling_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        compile_kernels(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
