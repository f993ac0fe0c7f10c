"""The GPU's kernels in Triton's interpreter, on a CPU: which numbers they read, and which split they have.

The interpreter must be asked for before Triton is imported, so `test_schedule.py` starts these in processes of their
own. It adds in another order than a GPU: numbers are compared with a tolerance, and bits are tested elsewhere.
"""

import operator
import os
from typing import Any

import pytest
import torch
from torch import Tensor

assert os.environ.get("TRITON_INTERPRET") == "1", "start these by test_schedule.py"
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

from blockpilot.gpu import kernels, reference  # noqa: E402
from blockpilot.gpu.interface import (  # noqa: E402
    AttentionLayer,
    Convolution,
    Experts,
    Norm,
    Parts,
    PassInputs,
    Rope,
)
from blockpilot.gpu.kernels import attention  # noqa: E402
from blockpilot.gpu.kernels.products import multiply  # noqa: E402
from blockpilot.gpu.schedule import (  # noqa: E402
    CHUNK,
    GROUP_CHUNKS,
    AttentionPlan,
    FewPlan,
    ManyPlan,
    TiledPlan,
    num_splits,
    part_size,
)
from tests.unit.gpu.pieces import (  # noqa: E402
    Parents,
    block_inputs,
    chain,
    is_chain,
    numbers,
    prompt_inputs,
    random_tree,
    tree_inputs,
)

HEADS, KV, DIM, CAPACITY = 4, 2, 16, 450
PLANS = [AttentionPlan(16, 0), AttentionPlan(32, 1), AttentionPlan(64, GROUP_CHUNKS)]
NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def mended() -> Any:
    """The interpreter runs kernels as plain Python. There numbers known to the compiler must leave operations to
    tensors, and a tensor with one number must be a number, which NumPy has stopped to grant."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_further(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_further)
        patch.setattr(attention, "COMBINED", 4)  # what is unrolled for a GPU takes long here
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
            run = getattr(operator, name)

            def before(self: Any, other: Any, run: Any = run) -> Any:
                if isinstance(other, tl.tensor):
                    return NotImplemented
                return tl.constexpr(run(self.value, getattr(other, "value", other)))

            def behind(self: Any, other: Any, run: Any = run) -> Any:
                return tl.constexpr(run(getattr(other, "value", other), self.value))

            patch.setattr(tl.constexpr, f"__{name.strip('_')}__", before)
            patch.setattr(tl.constexpr, f"__r{name.strip('_')}__", behind, raising=False)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def make_layer(num_slots: int = 4, num_heads: int = HEADS, num_kv: int = KV, dim: int = DIM) -> AttentionLayer:
    angles = torch.randn(CAPACITY + 64, dim // 2)
    norms = Norm(torch.randn(dim), 1e-6), Norm(torch.randn(dim), 1e-6)
    caches = torch.randn(2, num_slots, num_kv, CAPACITY, dim)
    return AttentionLayer(*caches, Rope(angles.cos(), angles.sin()), norms, num_heads)


def poison(layer: AttentionLayer, inputs: PassInputs, sizes: list[int]) -> AttentionLayer:
    """The layer without every row that no token of the pass sees."""
    kept = [torch.full_like(part, NAN) for part in (layer.keys, layer.values)]
    for slot, start, size in zip(inputs.slots.tolist(), inputs.starts.tolist(), sizes, strict=True):
        for part, whole in zip(kept, (layer.keys, layer.values), strict=True):
            part[slot, :, : start + size] = whole[slot, :, : start + size]
    return layer._replace(keys=kept[0], values=kept[1])


TREES: list[tuple[list[Parents], list[int], int]] = [  # trees, starts, tokens with those that round up
    ([random_tree(0, 12, 4)], [0], 12),
    ([random_tree(1, 12)], [70], 16),
    ([random_tree(2, 30, 2)], [240], 33),
    ([random_tree(3, 9, 3), chain(8), chain(1), random_tree(4, 3, 1)], [256, 60, 130, 63], 9),
    ([chain(20), chain(1)], [250, 70], 20),
    ([chain(1), chain(1)], [319, 0], 1),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("trees", "starts", "count"), TREES)
def test_attention_of_trees_and_chains(
    plan: AttentionPlan, trees: list[Parents], starts: list[int], count: int
) -> None:
    inputs = tree_inputs(trees, [3, 1, 0, 2][: len(trees)], starts, count=count)
    whole, q = make_layer(), torch.randn(len(inputs.positions), HEADS, DIM)
    found = kernels.attend(q, poison(whole, inputs, list(map(len, trees))), kernels.lay_out(inputs), plan)
    assert_close(found, reference.attend(q, whole, inputs))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("sizes", "starts"), [([20, 7], [250, 0]), ([35], [30])])
def test_attention_of_prompts_and_blocks(plan: AttentionPlan, sizes: list[int], starts: list[int]) -> None:
    whole, slots = make_layer(), [2, 0][: len(sizes)]
    for inputs in (prompt_inputs(sizes, slots, starts), block_inputs(sizes, slots, starts)):
        q = torch.randn(len(inputs.positions), HEADS, DIM)
        extents = [inputs.count] * len(sizes) if inputs.masks is None else sizes
        found = kernels.attend(q, poison(whole, inputs, extents), kernels.lay_out(inputs), plan)
        assert_close(found, reference.attend(q, whole, inputs))


@pytest.mark.parametrize("plan", PLANS)
def test_padding_of_a_prompt_may_reach_beyond_its_slot(plan: AttentionPlan) -> None:
    inputs = prompt_inputs([10], [0], [CAPACITY - 15], count=20)
    layer, q = make_layer(1), torch.randn(20, HEADS, DIM)
    assert_close(kernels.attend(q, layer, inputs, plan)[:10], reference.attend(q, layer, inputs)[:10])


@pytest.mark.parametrize("plan", PLANS)
def test_a_node_mixes_its_ancestors_and_nothing_else(plan: AttentionPlan) -> None:
    """All scores are equal, so that its values are the mean of the rows that it read; the others are no numbers."""
    tree, start = random_tree(5, 8, 3), 61
    assert not is_chain(tree)
    inputs, q = kernels.lay_out(tree_inputs([tree], [1], [start])), torch.zeros(len(tree), HEADS, DIM)
    for node in range(len(tree)):
        seen, above = set(range(start)), node
        while above >= 0:
            seen.add(start + above)
            above = tree[above]
        rows = torch.tensor(sorted(seen))
        layer = make_layer(2)
        expected = layer.values[1][:, rows].mean(1).repeat_interleave(HEADS // KV, 0).flatten()
        others = torch.ones(CAPACITY, dtype=torch.bool).index_fill(0, rows, value=False)
        layer.keys[1][:, others], layer.values[1][:, others] = NAN, NAN
        assert_close(kernels.attend(q, layer, inputs, plan)[node], expected)


@pytest.mark.parametrize("start", [0, 63, 64, 250])
def test_keys_of_nodes_stand_in_the_order_of_positions(start: int) -> None:
    """From the anchor's chunk on: cached rows, then ancestors by depth."""
    tree = random_tree(start, 80, 1 + start % 3 + 1)
    inputs = kernels.lay_out(tree_inputs([tree, chain(3)], [0, 1], [start, 5], count=81))
    assert inputs.tail_rows is not None and inputs.masks is not None
    first = start // CHUNK * CHUNK
    for node in range(len(tree)):
        path = [node]
        while tree[path[-1]] >= 0:
            path.append(tree[path[-1]])
        expected = [*range(first, start), *(start + ancestor for ancestor in reversed(path))]
        assert inputs.tail_rows[node, : len(expected)].tolist() == expected


def test_a_pass_without_trees_needs_no_layout() -> None:
    for inputs in (prompt_inputs([5], [0], [0]), block_inputs([5], [0], [0]), tree_inputs([chain(2)], [0], [9])):
        assert kernels.lay_out(inputs).tail_rows is None


@pytest.mark.parametrize(("num_requests", "count"), [(2, 3), (3, 60)])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_and_new_rows(num_requests: int, count: int, num_parts: int, has_bias: bool) -> None:
    """Few rows and many, which are other programs; some reach beyond the slot."""
    bias = torch.randn((HEADS + 2 * KV) * DIM) if has_bias else None
    layers = [make_layer()._replace(bias=bias)]
    layers.append(layers[0]._replace(keys=layers[0].keys.clone(), values=layers[0].values.clone()))
    inputs = prompt_inputs([count] * num_requests, range(num_requests), [5, 70, CAPACITY - 20][:num_requests])
    parts = torch.randn(num_parts, num_requests * count, (HEADS + 2 * KV) * DIM)
    qkv = Parts(parts, num_parts) if num_parts > 1 else Parts(parts[0])
    given = inputs.positions, inputs.slots, inputs.starts
    assert_close(kernels.rotate_store(qkv, layers[0], *given), reference.rotate_store(qkv, layers[1], *given))
    for found, expected in ((layers[0].keys, layers[1].keys), (layers[0].values, layers[1].values)):
        assert_close(found[..., : CAPACITY - 1, :], expected[..., : CAPACITY - 1, :])  # the last row is padding's


@pytest.mark.parametrize("starts", [[200], [0, 64, 200]])
@pytest.mark.parametrize("group", [1, 3, 20])
@pytest.mark.parametrize("has_norm", [False, True])
def test_one_token_of_each_request(group: int, starts: list[int], has_norm: bool) -> None:
    """Queries of one key head fit into a tile of 16, or do not. Models have norms or biases."""
    layer = make_layer()._replace(num_heads=group * KV)
    if not has_norm:
        layer = layer._replace(norms=None, bias=torch.randn((group + 2) * KV * DIM))
    other = layer._replace(keys=layer.keys.clone(), values=layer.values.clone())
    inputs = tree_inputs([chain(1)] * len(starts), [2, 0, 1][: len(starts)], starts)
    qkv = Parts(torch.randn(2, len(starts), (group + 2) * KV * DIM), 2)
    found, expected = kernels.rotate_attend(qkv, layer, inputs), reference.rotate_attend(qkv, other, inputs)
    assert_close(found, expected)
    assert_close(layer.keys, other.keys)
    assert_close(layer.values, other.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size"), [(1, 100, 200), (17, 70, 1100), (5, 130, 2600), (70, 70, 1100)]
)
def test_parts_are_those_of_the_weight(num_tokens: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_tokens, size).to(dtype), (torch.randn(num_rows, size) / size**0.5).to(dtype)
    splits = num_splits(num_rows, size)
    plans = [None, FewPlan(16, 32, 64), FewPlan(32, 64, 32), ManyPlan(64, 32, 64), ManyPlan(32, 64, 128)]
    if size * dtype.itemsize % 16 == 0:  # the copy engine's rows
        plans.append(TiledPlan(32, 64, 64))
    begins = range(0, size, part_size(size, splits))
    expected = [
        x[:, begin : begin + part_size(size, splits)].double()
        @ weight[:, begin : begin + part_size(size, splits)].double().T
        for begin in begins
    ]
    assert len(expected) == splits
    for plan in plans:
        out = torch.full((splits, num_tokens, num_rows), NAN)
        multiply(x, weight, out, splits=splits, plan=plan)
        assert_close(out, torch.stack(expected), 1e-4)
        if isinstance(plan, ManyPlan):  # it can add them, too
            out = torch.full((num_tokens, num_rows), NAN)
            multiply(x, weight, out, splits=splits, is_added=True, plan=plan)
            assert_close(out, torch.stack(expected).sum(0), 1e-4)
    assert_close(kernels.linear(x, weight).total, torch.stack(expected).sum(0), 1e-2 if splits == 1 else 1e-4)


@pytest.mark.parametrize("num_tokens", [1, 20, 70])
@pytest.mark.parametrize(("num_rows", "size"), [(100, 200), (150, 96)])
def test_gated_products(num_tokens: int, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_tokens, size), torch.randn(2 * num_rows, size) / size**0.5
    expected = reference.gated_linear(x, weight)
    for plan in (None, FewPlan(16, 32, 64), FewPlan(32, 64, 32), ManyPlan(64, 32, 64), TiledPlan(32, 64, 32)):
        out = torch.full((num_tokens, num_rows), NAN)
        multiply(x, weight, out, is_gated=True, plan=plan)
        assert_close(out, expected, 1e-4)


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize(("num_rows", "size"), [(100, 96), (160, 144), (70, 1100)])
def test_products_behind_a_norm(num_tokens: int, num_rows: int, size: int) -> None:
    dtype = torch.float16
    x, norm = torch.randn(num_tokens, size).to(dtype), Norm(torch.randn(size).to(dtype), 1e-6)
    weight = (torch.randn(num_rows, size) / size**0.5).to(dtype)
    for delta in (None, Parts(torch.randn(3, num_tokens, size), 3), Parts(torch.randn(num_tokens, size).to(dtype))):
        found, expected = (module.norm_linear(x, delta, norm, weight) for module in (kernels, reference))
        assert_close(found[0], expected[0], 2e-3)
        assert_close(found[1].total, expected[1].total, 1e-2)
        gated = [module.norm_gated_linear(x, delta, norm, weight) for module in (kernels, reference)]
        assert_close(gated[0][1], gated[1][1], 1e-2)


def test_norms_and_convolutions() -> None:
    x, norm, parts = torch.randn(6, 96), Norm(torch.randn(96), 1e-6), Parts(torch.randn(3, 6, 96), 3)
    around = Convolution(torch.randn(2, 2, 96), torch.randn(6, 2 * 2 * 6), numbers([0, 1, 2, 0, 1, 2]), 16)
    for delta, convolution in ((None, None), (parts, None), (parts, around), (Parts(x), around)):
        found, expected = (module.add_norm(x, delta, norm, convolution) for module in (kernels, reference))
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])
    assert_close(kernels.convolve(x, around), reference.convolve(x, around))


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [(1, 8, 2), (1, 20, 3), (1, 4, 1), (40, 6, 2)])
def test_routed_experts(num_tokens: int, num_experts: int, num_active: int, is_normalized: bool) -> None:
    size, inner = 96, 40
    x, delta, norm = torch.randn(num_tokens, size), Parts(torch.randn(2, num_tokens, size), 2), torch.randn(size)
    gate_up = torch.randn(num_experts, 2 * inner, size) / size**0.5
    down, router = torch.randn(num_experts, size, inner) / inner**0.5, torch.randn(num_experts, size) / size**0.5
    given = x, delta, Norm(norm, 1e-6), Experts(router, gate_up, down, num_active, is_normalized)
    found, expected = (module.norm_routed_mlp(*given) for module in (kernels, reference))
    assert_close(found[0], expected[0])
    assert_close(found[1].values, expected[1].values, 1e-4)  # by rank
