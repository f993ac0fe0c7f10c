"""Weights are packed into the smallest form that holds them, and lose nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from blockpilot.models.block_codes import BlockCodes
from blockpilot.native.weights import BYTES, CENTRED, FINE_NIBBLES, FINE_SIXES, HALVES, NIBBLES, OFFSET_BYTES
from tests.coded import FINE, FORMS, make_codes, make_fine_codes
from tests.unit.native.pieces import RUNNABLE, assert_close, multiply, open_named, pack

KERNELS = open_named(RUNNABLE[0])
KINDS = dict(zip(FORMS, (NIBBLES, CENTRED, BYTES, OFFSET_BYTES, HALVES), strict=True))
X = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)


def codes_of(form: str, rows: int = 40) -> BlockCodes:
    return make_codes(torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)), form)


@pytest.mark.parametrize(("form", "kind"), KINDS.items())
def test_every_form_has_its_kind(form: str, kind: int) -> None:
    weight = pack(KERNELS, codes_of(form))
    assert (weight.info.rows, weight.info.size, weight.info.kind) == (40, 64, kind)
    assert weight.info.data % 64 == 0 and weight.info.data == weight.data.ctypes.data


@pytest.mark.parametrize(
    ("form", "bits"), [("centred", 4.5), ("nibbles", 5), ("bytes", 8.5), ("offset bytes", 10), ("halves", 10)]
)
def test_what_a_weight_takes(form: str, bits: float) -> None:
    """Scales and offsets of the last two are no half precision numbers here."""
    assert pack(KERNELS, codes_of(form, rows=48)).num_bytes * 8 == bits * 48 * 64


@pytest.mark.parametrize(
    ("form", "kind", "bits"), [("fine nibbles", FINE_NIBBLES, 4.625), ("fine sixes", FINE_SIXES, 6.625)]
)
def test_steps_that_256_weights_share_stay_what_they_are(form: str, kind: int, bits: float) -> None:
    codes = make_fine_codes(torch.randn(48, 512, generator=torch.Generator().manual_seed(0)), form)
    weight = pack(KERNELS, codes)
    assert weight.info.kind == kind and weight.num_bytes * 8 == bits * 48 * 512


def test_codes_that_no_form_with_steps_holds_are_packed_with_plain_scales() -> None:
    """Q5_K has 5 bits."""
    codes = make_fine_codes(torch.randn(20, 256, generator=torch.Generator().manual_seed(0)), "fine nibbles")
    wide = replace(codes, codes=codes.codes + np.int8(16))
    assert pack(KERNELS, wide).info.kind == OFFSET_BYTES
    sixes = make_fine_codes(torch.randn(20, 256, generator=torch.Generator().manual_seed(0)), "fine sixes")
    assert pack(KERNELS, replace(sixes, codes=sixes.codes + np.int8(1))).info.kind == HALVES


@pytest.mark.parametrize("form", FINE)
def test_rows_of_shared_steps_are_chosen_and_joined(form: str) -> None:
    first, second = (
        make_fine_codes(torch.randn(20, 256, generator=torch.Generator().manual_seed(i)), form) for i in (0, 1)
    )
    joined, order = BlockCodes.join([first, second]), np.array([25, 3, 39])
    chosen = joined.rows(order)
    x = np.random.default_rng(2).standard_normal((3, 256)).astype(np.float32)
    expected = np.concatenate([multiply(KERNELS, pack(KERNELS, part), x) for part in (first, second)], axis=1)
    assert np.array_equal(multiply(KERNELS, pack(KERNELS, joined), x), expected)
    assert np.array_equal(multiply(KERNELS, pack(KERNELS, chosen), x), expected[:, order])
    assert first.form != make_codes(torch.randn(4, 256), FINE[form]).form


def test_scales_that_half_precision_does_not_hold_stay_what_they_are() -> None:
    codes = codes_of("bytes")
    for factor in (1 + 1e-5, 1e7, 1e-9):
        scaled = BlockCodes(codes.codes, codes.scales * np.float32(factor))
        weight = pack(KERNELS, scaled)
        assert not weight.info.is_half and pack(KERNELS, codes).info.is_half
        assert_close(multiply(KERNELS, weight, X), scaled, X)


def test_weights_lie_side_by_side_and_leave_each_other_alone() -> None:
    all_codes = [codes_of(form, rows) for rows in (1, 17, 16, 33) for form in FORMS]
    weights = [pack(KERNELS, codes) for codes in all_codes]
    for codes, weight in zip(all_codes, weights, strict=True):
        assert_close(multiply(KERNELS, weight, X), codes, X)


def test_a_weight_that_is_larger_than_what_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpilot.native.weights.ARENA_BYTES", 1 << 10)
    monkeypatch.setattr(KERNELS, "arena", None)
    codes = codes_of("bytes", rows=500)
    assert_close(multiply(KERNELS, pack(KERNELS, codes), X), codes, X)
