"""Codes must hold exactly the weights that a GGUF file dequantizes to."""

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockpilot.models.block_codes import INTEGER_KINDS, BlockCodes, decode_blocks, join_parts

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}  # where they stand in a block
HALVES |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_weight(rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Any bytes are a block, if its numbers in half precision are finite."""
    random = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = random.integers(0, 256, (rows, blocks, size), np.uint8)
    for start in HALVES[kind]:
        numbers = random.standard_normal((rows, blocks, 1)).astype(np.float16)
        data[..., start : start + 2] = numbers.view(np.uint8)
    return data.reshape(rows, -1)


def make_codes(kind: str, rows: int = 100, columns: int = 96) -> BlockCodes:
    codes = decode_blocks(quantize(random_weight(rows, columns), gguf.GGMLQuantizationType[kind]), kind)
    assert codes is not None
    return codes


@pytest.mark.parametrize("kind", INTEGER_KINDS)
@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_codes_are_exactly_the_dequantized_weights(kind: str, rows: int, blocks: int, seed: int) -> None:
    data = random_blocks(kind, rows, blocks, seed)
    codes = decode_blocks(data, kind)
    assert codes is not None
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert codes.codes.shape == expected.shape and codes.codes.dtype == np.int8
    assert codes.scales.shape[1] == expected.shape[1] // (16 if kind in ("Q3_K", "Q6_K") else 32)
    np.testing.assert_array_equal(codes.dequantize(), expected)
    if (fine := codes.fine) is not None:
        per_step = codes.scales.shape[1] // fine.steps.shape[2]
        np.testing.assert_array_equal(codes.scales, fine.scales * np.repeat(fine.steps[0], per_step, axis=1))
    if fine is not None and fine.offsets is not None:
        np.testing.assert_array_equal(codes.offsets, fine.offsets * np.repeat(fine.steps[1], 8, axis=1))


def test_every_form_of_a_file_is_tested() -> None:
    assert set(HALVES) == set(INTEGER_KINDS)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_of_a_matrix_lie_near_it(kind: str) -> None:
    weight, step = random_weight(100, 96), {"4": 0.6, "5": 0.3, "8": 0.02}[kind[1]]
    assert np.abs(make_codes(kind).dequantize() - weight).max() < step


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q2_K", "IQ4_NL"])
def test_other_kinds_have_no_codes(kind: str) -> None:
    assert decode_blocks(random_weight(4, 32).view(np.uint8), kind) is None


def test_vectors_have_no_codes() -> None:
    assert decode_blocks(random_blocks("Q8_0", 1, 2, 0)[0], "Q8_0") is None


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_joined_parts_and_chosen_rows(kind: str) -> None:
    first, second = make_codes(kind, rows=64), make_codes(kind, rows=70)
    (joined,) = join_parts([first, second])
    np.testing.assert_array_equal(joined.dequantize()[64:], second.dequantize())
    order = np.array([5, 3, 100])
    np.testing.assert_array_equal(joined.rows(order).dequantize(), joined.dequantize()[order])


def test_parts_of_different_forms_stay_apart() -> None:
    sixteens = decode_blocks(random_blocks("Q6_K", 8, 1, 0), "Q6_K")
    thirty_twos = decode_blocks(random_blocks("Q4_K", 8, 1, 0), "Q4_K")
    whole = decode_blocks(random_blocks("Q8_0", 8, 8, 0), "Q8_0")
    assert sixteens is not None and thirty_twos is not None and whole is not None
    assert len({part.form for part in (sixteens, thirty_twos, whole)}) == 3
    assert join_parts([thirty_twos, sixteens, whole]) == (thirty_twos, sixteens, whole)
    assert len(join_parts([whole, whole])) == 1


@pytest.mark.parametrize("quantize_weight", [BlockCodes.quantize, BlockCodes.quantize_q8_0])
def test_rounded_weights_are_off_by_half_a_step_and_stay_when_rounded_again(quantize_weight) -> None:
    weight = random_weight(40, 96)
    weight[3, 32:64] = 0
    codes = quantize_weight(weight)
    top = np.abs(weight.reshape(40, 3, 32)).max(-1).repeat(32, axis=1)
    assert (np.abs(codes.dequantize() - weight) <= top / 127 * 0.503).all()
    again = quantize_weight(codes.dequantize())
    np.testing.assert_array_equal(again.dequantize(), codes.dequantize())


def test_q8_0_is_what_a_file_stores() -> None:
    weight = random_weight(40, 96)
    stored = decode_blocks(quantize(weight, gguf.GGMLQuantizationType.Q8_0), "Q8_0")
    ours = BlockCodes.quantize_q8_0(weight)
    assert stored is not None
    np.testing.assert_array_equal(ours.scales, stored.scales)
    assert (np.abs(ours.codes.astype(int) - stored.codes) <= 1).all()  # they divide before scales are rounded
