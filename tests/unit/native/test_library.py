"""The choice of instructions, and products of all of them against plain loops."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models.block_codes import BlockCodes
from blockpilot.native import library
from blockpilot.native.library import find_instructions, open_kernels
from tests.coded import FINE, FORMS, make_codes, make_fine_codes
from tests.unit.native.pieces import RUNNABLE, Floats, assert_close, multiply, open_named, pack

EXTREMES = {"nibbles": (0, 15), "centred": (-8, 7)} | dict.fromkeys(FORMS[2:], (-128, 127))  # of codes
every_set = pytest.mark.parametrize("name", RUNNABLE)


def random_rows(count: int, size: int, seed: int = 0) -> Floats:
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, size)) * 10.0 ** random.integers(-3, 4, (count, 1))).astype(np.float32)


def random_codes(form: str, rows: int, size: int, seed: int = 0) -> BlockCodes:
    return make_codes(torch.from_numpy(random_rows(rows, size, seed + 1)), form)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine of the name `machine` with `features`, and empty libraries of all names in `folder`."""
    found = SimpleNamespace(folder=tmp_path, machine="x86_64", features=7)
    monkeypatch.delenv("BLOCKPILOT_CPU", raising=False)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library.platform, "machine", lambda: found.machine)
    monkeypatch.setattr(library, "_load", lambda path: SimpleNamespace(bp_find_features=lambda: found.features))
    for name in {name for known in library.INSTRUCTIONS.values() for name in known}:
        library._path(name).touch()
    return found


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", 7, "avx512-vnni"),
        ("x86_64", 5, "avx512-vnni"),
        ("AMD64", 3, "avx-vnni"),
        ("x86_64", 1, "avx2"),
        ("x86_64", 0, "portable"),
        ("aarch64", 1, "arm-dot"),
        ("arm64", 0, "portable"),
        ("riscv64", 7, None),
    ],
)
def test_the_best_instructions_that_a_machine_has(pretended, machine, features, best) -> None:
    pretended.machine, pretended.features = machine, features
    assert find_instructions() == best


def test_others_can_be_asked_for(pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.features = 1
    monkeypatch.setenv("BLOCKPILOT_CPU", " portable ")
    assert find_instructions() == "portable"
    monkeypatch.setenv("BLOCKPILOT_CPU", "none")
    assert find_instructions() is None
    for name in ("avx512-vnni", "sse9"):
        monkeypatch.setenv("BLOCKPILOT_CPU", name)
        with pytest.raises(InputError, match=rf"BLOCKPILOT_CPU is '{name}', and this machine runs avx2, portable or"):
            find_instructions()


def test_libraries_that_were_not_built(pretended) -> None:
    library._path("avx512-vnni").unlink()
    assert find_instructions() == "avx-vnni"
    library._path("portable").unlink()  # it tells what the machine has
    assert find_instructions() is None and open_kernels(1) is None


def test_a_damaged_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library._path(RUNNABLE[-1]).write_bytes(b"no library")
    library._path("portable").write_bytes(b"no library")
    with pytest.raises(BlockPilotError, match=r"kernels-portable.* cannot be loaded .*; install BlockPilot again"):
        find_instructions()


def test_this_machine_has_kernels() -> None:
    assert "portable" in RUNNABLE and find_instructions() in RUNNABLE
    assert [open_named(name)._library.bp_instructions().decode() for name in RUNNABLE] == RUNNABLE


def test_threads_are_shared() -> None:
    assert open_kernels(2) is open_kernels(2) is not open_kernels(1)


@every_set
@settings(deadline=None, max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_products_are_those_of_plain_loops(name, form, rows, blocks, count, seed) -> None:
    codes, x = random_codes(form, rows, 32 * blocks, seed), random_rows(count, 32 * blocks, seed)
    kernels = open_named(name)
    weight = pack(kernels, codes)
    found = multiply(kernels, weight, x)
    assert_close(found, codes, x)
    place = seed % count
    assert np.array_equal(multiply(kernels, weight, x[place : place + 1])[0], found[place]), "alone it has other bits"
    assert np.array_equal(multiply(kernels, weight, x[: place + 1]), found[: place + 1])


@every_set
@settings(deadline=None, max_examples=30)
@given(
    form=st.sampled_from(tuple(FINE)),
    rows=st.integers(1, 40),
    supers=st.integers(1, 3),
    count=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_scales_in_steps_give_the_bits_of_plain_scales(name, form, rows, supers, count, seed) -> None:
    codes = make_fine_codes(torch.from_numpy(random_rows(rows, 256 * supers, seed + 1)), form)
    kernels, x = open_named(name), random_rows(count, 256 * supers, seed)
    found = multiply(kernels, pack(kernels, codes), x)
    assert np.array_equal(found, multiply(kernels, pack(kernels, replace(codes, fine=None)), x))
    assert np.array_equal(multiply(kernels, pack(kernels, codes), x[:1]), found[:1])


@every_set
@pytest.mark.parametrize("form", FORMS)
def test_threads_change_no_bit(name: str, form: str) -> None:
    codes, x = random_codes(form, 777, 96), random_rows(37, 96)
    weight = pack(open_named(name, 3), codes)
    expected = multiply(open_named(name), weight, x)
    for num_threads in (2, 3):
        for _ in range(5):
            assert np.array_equal(multiply(open_named(name, num_threads), weight, x), expected)


@pytest.mark.parametrize("form", FORMS)
def test_instructions_change_no_bit(form: str) -> None:
    """Sums of codes are integers and all else is one multiply-add after the other; `portable` rounds between them."""
    codes, x = random_codes(form, 50, 160), random_rows(11, 160)
    fused = [name for name in RUNNABLE if name != "portable"]
    found = [multiply(open_named(name), pack(open_named(name), codes), x) for name in fused]
    assert all(np.array_equal(one, found[0]) for one in found)


@every_set
@pytest.mark.parametrize("form", FINE)
@pytest.mark.parametrize("signs", ["same", "opposite", "mixed"])
def test_extremes_of_six_bits_do_not_saturate(name: str, form: str, signs: str) -> None:
    codes = make_fine_codes(torch.ones(3, 256), form)
    low, high = (0, 15) if form == "fine nibbles" else (-32, 31)
    mixed = np.random.default_rng(0).choice((low, high), 256)
    rows = np.stack([np.full(256, low), np.full(256, high), mixed]).astype(np.int8)
    codes, kernels = replace(codes, codes=rows), open_named(name)
    x = np.full((5, 256), 3, np.float32) * {"same": 1, "opposite": -1, "mixed": np.where(mixed > 0, 1, -1)}[signs]
    assert_close(multiply(kernels, pack(kernels, codes), x.astype(np.float32)), codes, x.astype(np.float32))


@every_set
@pytest.mark.parametrize(("form", "extremes"), EXTREMES.items())
@pytest.mark.parametrize("signs", ["same", "opposite", "mixed"])
def test_extremes_do_not_saturate(name: str, form: str, extremes: tuple[int, int], signs: str) -> None:
    size, per_block = 96, 2 if form == "halves" else 1
    mixed = np.random.default_rng(0).choice(extremes, size)
    rows = np.stack([np.full(size, extremes[0]), np.full(size, extremes[1]), mixed, sum(extremes) - mixed])
    offsets = np.ones((4, size // 32), np.float32) if form in ("nibbles", "offset bytes") else None
    codes = BlockCodes(rows.astype(np.int8), np.full((4, per_block * size // 32), 0.5, np.float32), offsets)
    x = np.full((5, size), 3, np.float32) * {"same": 1, "opposite": -1, "mixed": np.where(mixed > 0, 1, -1)}[signs]
    kernels = open_named(name)
    weight = pack(kernels, codes)
    assert weight.info.kind == FORMS.index(form)
    assert_close(multiply(kernels, weight, x.astype(np.float32)), codes, x.astype(np.float32))


@every_set
def test_zeros_tiny_and_huge_numbers(name: str) -> None:
    kernels, codes = open_named(name), random_codes("bytes", 20, 64)
    weight, x = pack(kernels, codes), random_rows(6, 64)
    x[0], x[1, :32], x[2, 5] = 0, 0, 1e30
    x[3] = 1e-40  # too small for a scale of its own
    x[4] *= 1e-30
    found = multiply(kernels, weight, x)
    assert_close(found[[0, 1, 2, 4, 5]], codes, x[[0, 1, 2, 4, 5]])
    assert (found[0] == 0).all() and (np.abs(found[3]) < 1e-30).all()


@every_set
def test_calls_from_many_threads_take_turns(name: str) -> None:
    kernels, codes = open_named(name, 2), random_codes("centred", 300, 64)
    weight, inputs = pack(kernels, codes), [random_rows(3, 64, seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: multiply(kernels, weight, x), inputs))
    assert all(np.array_equal(multiply(kernels, weight, x), one) for x, one in zip(inputs, found, strict=True))
