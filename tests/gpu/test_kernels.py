"""Every GPU kernel against the reference. One command runs all of these: `pytest -m gpu`."""

import pytest
import torch
from torch import Tensor

from blockpilot.gpu import reference
from blockpilot.gpu.interface import (
    AttentionLayer,
    ContextLayers,
    Convolution,
    Experts,
    Noise,
    Norm,
    Parts,
    PassInputs,
    Rope,
    Selector,
)
from blockpilot.gpu.schedule import AttentionPlan
from tests.gpu.conftest import DEVICE
from tests.unit.gpu.pieces import block_inputs, chain, prompt_inputs, random_tree, tree_inputs

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def kernels():  # type: ignore[no-untyped-def]
    from blockpilot.gpu import kernels as found

    return found


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(expected.float().abs().max()))
    assert float((found.float() - expected.float()).abs().max()) <= TOLERANCE[dtype] * scale


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_inputs(kind: str, num_requests: int, count: int, context: int) -> PassInputs:
    """Requests of different sizes at different places: a tree, a chain and a tree by turns, all chains, and so on."""
    slots = range(1, num_requests + 1)
    starts = [(0, 70, 256, 310, 191)[place % 5] for place in range(num_requests)]
    sizes = [max(1, count - 3 * place) for place in range(num_requests)]
    if kind == "prompts":
        return prompt_inputs(sizes, slots, starts, context=context, device=DEVICE)
    if kind == "blocks":
        return block_inputs(sizes, slots, starts, context=context, device=DEVICE)
    trees = [
        chain(size) if kind == "chains" or place % 3 == 1 else random_tree(place, size, reach=6)
        for place, size in enumerate(sizes)
    ]
    return tree_inputs(trees, slots, starts, context=context, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "num_heads", "num_kv", "dim", "num_requests", "count", "context", "unit", "has_norm", "num_parts"),
    [
        ("trees", 9, 3, 64, 2, 4, 512, 0, False, 1),
        ("trees", 8, 2, 32, 3, 5, 512, 1, True, 3),
        ("trees", 4, 4, 48, 3, 30, 1 << 30, 4, True, 2),
        ("trees", 3, 1, 64, 8, 33, 512, 0, False, 2),
        ("trees", 6, 2, 16, 2, 33, 512, 1, False, 1),
        ("trees", 32, 8, 128, 1, 129, 512, 4, True, 4),
        ("trees", 8, 2, 128, 3, 40, 1 << 30, 0, True, 2),
        ("trees", 8, 2, 256, 2, 12, 512, 0, False, 1),
        ("chains", 4, 4, 48, 1, 1, 512, 1, True, 2),
        ("chains", 4, 2, 32, 3, 1, 512, 4, True, 2),
        ("chains", 32, 8, 128, 3, 1, 1 << 30, 4, True, 4),
        ("chains", 9, 3, 64, 3, 16, 512, 0, False, 2),
        ("chains", 32, 8, 128, 1, 64, 512, 1, True, 1),
        ("chains", 14, 2, 96, 2, 2, 512, 1, False, 2),
        ("prompts", 9, 3, 64, 2, 200, 512, 0, False, 1),
        ("prompts", 32, 8, 128, 3, 64, 1 << 30, 0, True, 1),
        ("prompts", 4, 2, 96, 3, 33, 512, 4, True, 2),
        ("prompts", 4, 2, 256, 1, 70, 512, 0, True, 2),
        ("blocks", 8, 2, 128, 3, 16, 512, 1, True, 2),
        ("blocks", 4, 2, 32, 2, 40, 512, 0, True, 1),
        ("blocks", 8, 2, 128, 2, 5, 1 << 30, 4, False, 1),
    ],
)
def test_attention(  # type: ignore[no-untyped-def]
    kernels, kind, dtype, num_heads, num_kv, dim, num_requests, count, context, unit, has_norm, num_parts
) -> None:
    torch.manual_seed(0)
    num_tokens = num_requests * count
    caches = [random(num_requests + 2, num_kv, 450, dim, dtype=dtype) for _ in range(2)]
    parts = random(num_parts, num_tokens, (num_heads + 2 * num_kv) * dim)
    qkv = Parts(parts, num_parts) if num_parts > 1 else Parts(parts[0].to(dtype))
    angles = random(512, dim // 2)
    norms = (Norm(random(dim, dtype=dtype), 1e-6), Norm(random(dim, dtype=dtype), 1e-6)) if has_norm else None
    rope, inputs = Rope(angles.cos(), angles.sin()), make_inputs(kind, num_requests, count, context)
    bias = None if has_norm else random((num_heads + 2 * num_kv) * dim, dtype=dtype)
    layers = [AttentionLayer(*(cache.clone() for cache in caches), rope, norms, num_heads, bias) for _ in range(3)]
    given = inputs.positions, inputs.slots, inputs.starts
    expected_q = reference.rotate_store(qkv, layers[0], *given)
    expected = reference.attend(expected_q, layers[0], inputs)
    q = kernels.rotate_store(qkv, layers[1], *given)
    plan = AttentionPlan(tile=32, unit=unit)
    laid_out = kernels.lay_out(inputs)
    mixed = kernels.attend(q, layers[1], laid_out, plan)
    together = kernels.rotate_attend(qkv, layers[2], laid_out)
    assert_close(q, expected_q, dtype)
    for layer, found in ((layers[1], mixed), (layers[2], together)):
        assert_close(layer.keys, layers[0].keys, dtype)
        assert_close(layer.values, layers[0].values, dtype)
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_convolutions(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, weight, parts = random(6, 96, dtype=dtype), random(96, dtype=dtype), Parts(random(3, 6, 96), 3)
    offsets = integers(0, 1, 2, 0, 1, 2)
    around = Convolution(random(2, 2, 96, dtype=dtype), random(6, 2 * 2 * 6, dtype=dtype), offsets, 16)
    for delta, convolution in ((None, None), (parts, None), (parts, around), (Parts(x), around)):
        found = kernels.add_norm(x, delta, Norm(weight, 1e-6), convolution)
        expected = reference.add_norm(x, delta, Norm(weight, 1e-6), convolution)
        assert_close(found[0], expected[0], dtype)
        assert_close(found[1], expected[1], dtype)
    ids = integers(4, 0, 5, 5, 1)
    assert torch.equal(kernels.embed(ids, x), x[ids.long()])
    assert_close(kernels.convolve(x, around), reference.convolve(x, around), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "size", "num_rows"),
    [
        (1, 96, 70),
        (1, 2560, 6144),
        (3, 576, 960),
        (12, 64, 192),
        (16, 576, 960),
        (16, 1536, 576),
        (16, 4096, 2560),
        (17, 320, 128),
        (24, 2560, 130),
        (48, 576, 960),
        (64, 640, 256),
        (64, 1024, 70),
        (65, 96, 64),
        (512, 576, 960),
    ],
)
def test_linear(kernels, dtype: torch.dtype, num_tokens: int, size: int, num_rows: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, weight = random(num_tokens, size, dtype=dtype), random(num_rows, size, dtype=dtype)
    expected = x.double() @ weight.double().T
    assert_close(kernels.linear(x, weight).total, expected, dtype)
    gates, ups = (expected / size**0.5).chunk(2, dim=-1)
    scaled = (weight / size**0.5).to(dtype)
    assert_close(kernels.gated_linear(x, scaled), torch.nn.functional.silu(gates) * ups, dtype)
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=DEVICE)
    assert_close(kernels.linear(x, weight, out=out).values, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("size", "num_rows"), [(576, 960), (1024, 512), (2560, 130), (96, 6), (9728, 64)])
def test_products_behind_a_norm(kernels, dtype: torch.dtype, num_tokens: int, size: int, num_rows: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, norm = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype)
    weight = (random(num_rows, size) / size**0.5).to(dtype)
    for delta in (None, Parts(random(3, num_tokens, size), 3), Parts(random(num_tokens, size, dtype=dtype))):
        given = (x, delta, Norm(norm, 1e-6), weight)
        total, product = kernels.norm_linear(*given)
        expected_total, expected = reference.norm_linear(*given)
        assert_close(total, expected_total, dtype)
        assert_close(product.total, expected.total, dtype)
        total, gated = kernels.norm_gated_linear(*given)
        expected_total, expected_gated = reference.norm_gated_linear(*given)
        assert_close(total, expected_total, dtype)
        assert_close(gated, expected_gated, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_active", "size", "inner"),
    [
        (1, 8, 2, 96, 80),
        (1, 128, 8, 96, 80),
        (1, 8, 2, 2048, 768),
        (1, 20, 3, 96, 80),
        (1, 4, 1, 96, 80),
        (1, 4, 2, 130, 9000),
        (1, 160, 1, 96, 80),
        (2, 128, 8, 96, 80),
        (16, 20, 3, 96, 80),
        (40, 128, 8, 96, 80),
        (70, 8, 2, 130, 80),
        (300, 20, 1, 96, 80),
        (300, 8, 2, 96, 80),
        (5, 4, 1, 96, 80),
    ],
)
def test_routed_experts(  # type: ignore[no-untyped-def]
    kernels, dtype, is_normalized, num_tokens, num_experts, num_active, size, inner
) -> None:
    torch.manual_seed(0)
    x, delta = random(num_tokens, size, dtype=dtype), Parts(random(2, num_tokens, size), 2)
    norm, router = random(size, dtype=dtype), random(num_experts, size, dtype=dtype) / size**0.5
    gate_up = random(num_experts, 2 * inner, size, dtype=dtype) / size**0.5
    down = random(num_experts, size, inner, dtype=dtype) / inner**0.5
    given = (x, delta, Norm(norm, 1e-6), Experts(router, gate_up, down, num_active, is_normalized))
    (total, parts), (expected_total, expected) = kernels.norm_routed_mlp(*given), reference.norm_routed_mlp(*given)
    assert_close(total, expected_total, dtype)
    assert_close(parts.total, expected.total, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_a_token_that_is_not_a_number_spoils_no_other(kernels, dtype: torch.dtype, num_tokens: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, delta = random(num_tokens, 96, dtype=dtype), Parts(random(num_tokens, 96, dtype=dtype))
    x[0, 5] = float("nan")
    norm, router = random(96, dtype=dtype), random(32, 96, dtype=dtype) / 10
    gate_up, down = random(32, 2 * 80, 96, dtype=dtype) / 10, random(32, 96, 80, dtype=dtype) / 9
    given = (x, delta, Norm(norm, 1e-6), Experts(router, gate_up, down, 2, is_normalized=True))
    (_, parts), (_, expected) = kernels.norm_routed_mlp(*given), reference.norm_routed_mlp(*given)
    assert bool(parts.total[0].isnan().all())
    if num_tokens > 1:
        assert_close(parts.total[1:], expected.total[1:], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [4, 45])
def test_rows_are_stored_and_moved(kernels, dtype: torch.dtype, count: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    rows, slots, starts = random(3, 2, 4, 2, 60, 16, dtype=dtype), integers(1, 3), integers(4, 7)
    projected = Parts(random(2, 2 * count, 3 * 2 * 2 * 16), 2)
    positions = integers(*range(4, 4 + count), *range(7, 7 + count))
    angles, weights = random(60, 8), random(3, 16, dtype=dtype)
    paths, counts = integers(0, 2, 5, 0, 0, 1, 0, 0).view(2, 4), integers(3, 2)
    results = []
    for module in (kernels, reference):
        own = rows.clone()
        layers = ContextLayers(own, Rope(angles.cos(), angles.sin()), Norm(weights, 1e-6))
        module.store_context(projected, layers, positions, slots, starts)
        module.move_rows(own, slots, starts, paths, counts)
        results.append(own)
    assert_close(results[0], results[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size", "num_best"), [(1, 100, 4), (15, 49152, 16), (3, 16384, 1), (2, 5000, 5)])
def test_rank_tokens(kernels, dtype: torch.dtype, num_rows: int, size: int, num_best: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(size, device=DEVICE) for _ in range(num_rows)]).float().mul(1e-3).to(dtype)
    found, expected = kernels.rank_tokens(logits, num_best), reference.rank_tokens(logits, num_best)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(logits.float().gather(1, found[1]), expected[0])  # few bits make ties
    assert_close(found[2], expected[2], torch.float32)
    names = torch.randperm(size, device=DEVICE) + 7
    assert torch.equal(kernels.rank_tokens(logits, num_best, names)[1], names[found[1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_best", [1, 16])
def test_sampled_tokens_are_those_of_the_reference(kernels, dtype: torch.dtype, num_best: int) -> None:  # type: ignore[no-untyped-def]
    """Requests that sample beside greedy ones, whose first token has no logits, as in a draft."""
    torch.manual_seed(0)
    logits, names = random(9, 3000, dtype=dtype), torch.randperm(49152, device=DEVICE)[:3000]
    temperatures = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)
    seeds = torch.tensor([[-5, 6, 7], [0, 3, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
    noise = Noise(temperatures, seeds, integers(*range(100, 112)), shift=1)
    found, expected = (module.rank_tokens(logits, num_best, names, noise) for module in (kernels, reference))
    assert_close(found[0], expected[0], torch.float32)
    assert_close(found[2], expected[2], torch.float32)
    is_equal = found[1] == expected[1]
    assert bool(is_equal[:3].all() and is_equal[6:].all())  # few bits make ties, with noise there are none


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "width", "rank"), [(15, 16, 64), (1, 5, 24), (3, 1, 16)])
def test_score_pairs(kernels, dtype: torch.dtype, depth: int, width: int, rank: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, depth, width), device=DEVICE)
    anchors = integers(3, 9, 9, 4, 9, 9).view(2, 3)[:, 0]  # a column, as in a block of tokens
    given = (random(2, depth, width), ids, anchors, random(2, depth, rank, dtype=dtype))
    books = Selector(*(random(50, rank, dtype=dtype) / rank**0.5 for _ in range(2)))
    for temperatures in (None, torch.tensor([0.0, 0.6], device=DEVICE)):
        found, expected = (module.score_pairs(*given, books, temperatures) for module in (kernels, reference))
        assert_close(found[0], expected[0], dtype)
        if depth > 1:
            assert_close(found[1], expected[1], dtype)


def test_noise_is_that_of_the_cpu() -> None:
    from blockpilot.models.noise import gumbel_noise

    positions = [0, 1, 77, 4000]
    expected = gumbel_noise(12345, positions, vocab_size=5000)
    found = gumbel_noise(12345, positions, vocab_size=5000, device=DEVICE).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
