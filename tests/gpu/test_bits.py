"""A token's numbers are the same bits in every pass: alone, among others, in a chain, a tree, a prompt, a padded graph.

Kernel by kernel against one token alone, then whole answers of tiny models against plain decoding, one request at a
time. Numbers are compared as integers: a tolerance would hide what these tests are for.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.engine.llm import LLM
from blockpilot.gpu.interface import AttentionLayer, Experts, Norm, Parts, PassInputs, Rope
from blockpilot.gpu.schedule import GROUP_CHUNKS, AttentionPlan, FewPlan, ManyPlan, TiledPlan, num_splits
from blockpilot.gpu.target import GpuTargetRunner
from tests.gpu.conftest import DEVICE
from tests.tiny import ALPHABET, RandomTreePilot, make_dflash, make_llm
from tests.unit.gpu.pieces import Parents, chain, paths, prompt_inputs, random_tree, tree_inputs

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = (1, 2, 5, 16, 17, 33, 64, 65, 128, 200, 257, 512)
EPS = 1e-6


@pytest.fixture(scope="module")
def kernels():  # type: ignore[no-untyped-def]
    from blockpilot.gpu import kernels as found

    return found


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def as_integers(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def is_same(found: Tensor, expected: Tensor) -> bool:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return torch.equal(as_integers(found), as_integers(expected))


def assert_same(found: Tensor, expected: Tensor, *what: object) -> None:
    """Also that there is something to compare."""
    assert bool(expected.isfinite().all()) and bool(expected.any()), what
    assert is_same(found, expected), (*what, f"{int((found != expected).sum())} of {found.numel()} numbers differ")


def add(parts: Parts) -> Tensor:
    """The sum in order; a number of its own for every token."""
    if parts.num_parts == 1:
        return parts.values
    total = parts.values[0]
    for part in parts.values[1:]:
        total = total + part
    return total


def one_by_one(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([run(x[row : row + 1]) for row in range(len(x))])


def cut(parts: Parts | None, rows: slice) -> Parts | None:
    if parts is None:
        return None
    return Parts(parts.values[..., rows, :].contiguous(), parts.num_parts)


WEIGHTS = [  # rows, size, gated
    (576, 576, False),
    (960, 576, False),
    (576, 1536, False),
    (3072, 576, True),
    (6144, 2560, False),
    (2560, 4096, False),
    (19456, 2560, True),
    (2560, 9728, False),
    (128, 2048, False),
    (100, 200, False),
    (300, 520, False),
    (200, 520, True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size", "is_gated"), WEIGHTS)
def test_products_of_any_number_of_tokens(kernels, dtype, num_rows, size, is_gated) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, weight = random(max(COUNTS), size, dtype=dtype), (random(num_rows, size) / size**0.5).to(dtype)

    def run(tokens: Tensor) -> Tensor:
        return kernels.gated_linear(tokens, weight) if is_gated else add(kernels.linear(tokens, weight))

    alone = one_by_one(run, x)
    for count in COUNTS:
        assert_same(run(x[:count]), alone[:count], count)
        assert_same(run(x[-count:]), alone[-count:], count, "at the end")


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_number_of_tokens(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Where a product has its place already it is not split."""
    torch.manual_seed(0)
    x, weight = random(max(COUNTS), 1536, dtype=dtype), (random(1009, 1536) / 40).to(dtype)

    def run(tokens: Tensor) -> Tensor:
        out = torch.empty(len(tokens), len(weight), dtype=dtype, device=DEVICE)
        return kernels.linear(tokens, weight, out=out).values

    alone = one_by_one(run, x)
    for count in COUNTS:
        assert_same(run(x[:count]), alone[:count], count)


def product_plans(x: Tensor, weight: Tensor) -> list[FewPlan | ManyPlan]:
    from blockpilot.gpu.kernels.products import can_tile

    if x.dtype == torch.float32:
        few = [FewPlan(16, 32, 32), FewPlan(32, 64, 16, num_stages=2), FewPlan(16, 16, 64, num_warps=2)]
        return [*few, ManyPlan(64, 64, 16, num_warps=4), ManyPlan(32, 64, 32, num_warps=4)]
    few = [FewPlan(16, 16, 64), FewPlan(16, 64, 128), FewPlan(32, 128, 64, num_warps=8), FewPlan(64, 64, 32)]
    many = [ManyPlan(128, 128), ManyPlan(64, 64, 32, num_warps=4), ManyPlan(128, 64, 128)]
    tiled = [TiledPlan(128, 64, 64, 4, 4), TiledPlan(64, 64, 128, 4, 3), TiledPlan(128, 128, 32, 8, 3)]
    return [*few, FewPlan(128, 64, 64), *many, *(tiled if can_tile(x, weight) else ())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "size", "is_gated"), [(576, 1536, False), (960, 576, False), (3072, 576, True), (100, 1100, False)]
)
def test_every_plan_of_a_product(kernels, dtype, num_rows, size, is_gated) -> None:  # type: ignore[no-untyped-def]
    from blockpilot.gpu.kernels.products import multiply

    torch.manual_seed(0)
    num_tokens, splits = 70, 1 if is_gated else num_splits(num_rows, size)
    x, weight = random(num_tokens, size, dtype=dtype), (random(num_rows, size) / size**0.5).to(dtype)
    expected = kernels.gated_linear(x, weight) if is_gated else add(kernels.linear(x, weight))
    shape = num_tokens, num_rows // 2 if is_gated else num_rows
    for plan in product_plans(x, weight):
        for is_added in {False, splits > 1 and isinstance(plan, ManyPlan)}:
            is_whole = is_added or splits == 1
            out = torch.empty(shape if is_whole else (splits, *shape), dtype=expected.dtype, device=DEVICE)
            multiply(x, weight, out, splits=splits, is_added=is_added, is_gated=is_gated, plan=plan)
            assert_same(add(Parts(out, 1 if is_whole else splits)), expected, plan, is_added)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_split_gives_other_bits(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Why the split must belong to the weight, and that these tests notice."""
    from blockpilot.gpu.kernels.products import multiply

    torch.manual_seed(0)
    x, weight = random(5, 4096, dtype=dtype), (random(640, 4096) / 64).to(dtype)
    sums = []
    for splits in (1, 2, 4):
        out = torch.empty((splits, 5, 640) if splits > 1 else (5, 640), dtype=torch.float32, device=DEVICE)
        multiply(x, weight, out, splits=splits)
        sums.append(add(Parts(out, splits)))
        torch.testing.assert_close(sums[-1], sums[0], rtol=1e-3, atol=1e-4)
    assert not is_same(sums[0], sums[1]) and not is_same(sums[1], sums[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize(("num_rows", "size"), [(1152, 576), (2048, 1024), (6144, 2560), (200, 100), (576, 1536)])
def test_products_behind_a_norm(kernels, dtype, num_rows, size, num_parts) -> None:  # type: ignore[no-untyped-def]
    """Few tokens of a small model norm their input in the product itself, others before."""
    torch.manual_seed(0)
    num_tokens, norm = 200, Norm(random(size, dtype=dtype), EPS)
    x, weight = random(num_tokens, size, dtype=dtype), (random(num_rows, size) / size**0.5).to(dtype)
    delta = {
        0: None,
        1: Parts(random(num_tokens, size, dtype=dtype)),
        3: Parts(random(3, num_tokens, size), 3),
    }[num_parts]

    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = x[rows], cut(delta, rows), norm, weight
        total, made = kernels.norm_linear(*own)
        return total, add(made), *kernels.norm_gated_linear(*own)

    singles = [run(slice(row, row + 1)) for row in range(num_tokens)]
    alone = [torch.cat(parts) for parts in zip(*singles, strict=True)]
    for count in (2, 15, 16, 17, 64, 65, 200):
        for found, expected in zip(run(slice(count)), alone, strict=True):
            assert_same(found, expected[:count], count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 576, 1024, 1536, 2560, 5120])
def test_norms_of_any_number_of_rows(kernels, monkeypatch, dtype: torch.dtype, size: int) -> None:  # type: ignore[no-untyped-def]
    from blockpilot.gpu.kernels import sublayers

    torch.manual_seed(0)
    norm, x = Norm(random(size, dtype=dtype), EPS), random(300, size, dtype=dtype) * 3
    for delta in (None, Parts(random(300, size, dtype=dtype)), Parts(random(4, 300, size), 4)):

        def run(rows: slice, delta: Parts | None = delta) -> tuple[Tensor, Tensor]:
            return kernels.add_norm(x[rows], cut(delta, rows), norm)

        alone = [torch.cat(part) for part in zip(*(run(slice(row, row + 1)) for row in range(300)), strict=True)]
        for count in (1, 5, 64, 65, 300):
            for found, expected in zip(run(slice(count)), alone, strict=True):
                assert_same(found, expected[:count], count)
        for num_warps in (1, 4, 8, 16, 32):
            with monkeypatch.context() as patch:
                patch.setattr(sublayers, "_num_warps", lambda *_, chosen=num_warps: chosen)
                for found, expected in zip(run(slice(7)), alone, strict=True):
                    assert_same(found, expected[:7], num_warps)


class Attended:
    """One layer's attention, and a text whose tokens were stored and mixed one by one."""

    def __init__(self, kernels, num_heads: int, num_kv: int, dim: int, dtype: torch.dtype, length: int) -> None:  # type: ignore[no-untyped-def]
        self.kernels, self.dtype, self.capacity = kernels, dtype, length + 200
        angles = torch.arange(self.capacity, device=DEVICE)[:, None] / 50 ** torch.linspace(0, 1, dim // 2).to(DEVICE)
        norms = Norm(random(dim, dtype=dtype), EPS), Norm(random(dim, dtype=dtype), EPS)
        caches = random(2, 1, num_kv, self.capacity, dim, dtype=dtype)
        self.width = (num_heads + 2 * num_kv) * dim
        bias = random(self.width, dtype=dtype)
        self.text = AttentionLayer(*caches, Rope(angles.cos(), angles.sin()), norms, num_heads, bias)
        self.qkv = random(length, self.width, dtype=dtype)

    def tokens(self, count: int) -> Tensor:
        return random(count, self.width, dtype=self.dtype)

    def read(self, first: int, last: int) -> Tensor:
        """Mixed values of a part of the text, one by one; what comes before was read already."""
        return torch.cat([self.step(self.text, self.qkv[place : place + 1], place) for place in range(first, last)])

    def step(self, layer: AttentionLayer, qkv: Tensor, position: int) -> Tensor:
        context = 2048 if position <= 2048 else 1 << 30
        inputs = tree_inputs([chain(1)], [0], [position], context=context, device=DEVICE)
        return self.kernels.rotate_attend(Parts(qkv), layer, inputs)

    def slots(self, starts: Sequence[int]) -> AttentionLayer:
        """A slot for each start that holds the text before it; all other rows are no numbers."""
        keys, values = (
            torch.full((len(starts), *part.shape[1:]), float("nan"), dtype=self.dtype, device=DEVICE)
            for part in (self.text.keys, self.text.values)
        )
        for slot, start in enumerate(starts):
            keys[slot, :, :start], values[slot, :, :start] = (
                self.text.keys[0, :, :start],
                self.text.values[0, :, :start],
            )
        return self.text._replace(keys=keys, values=values)

    def plain(self, start: int, tree: Parents, qkv: Tensor) -> Tensor:
        """What plain decoding gives every node, along each path."""
        layer, found = self.slots([start]), [qkv] * len(tree)
        for path in paths(tree):
            for depth, node in enumerate(path):
                found[node] = self.step(layer, qkv[node : node + 1], start + depth)
        return torch.cat(found)

    def run(self, inputs: PassInputs, starts: Sequence[int], qkv: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        layer = self.slots(starts)
        q = self.kernels.rotate_store(Parts(qkv), layer, inputs.positions, inputs.slots, inputs.starts)
        return self.kernels.attend(q, layer, self.kernels.lay_out(inputs), plan)

    def check(
        self,
        trees: Sequence[Parents],
        starts: Sequence[int],
        *,
        count: int = 0,
        context: int = 2048,
        plans: Sequence[AttentionPlan | None] = (None,),
    ) -> None:
        """Trees of one pass, each behind its part of the text."""
        count = count or max(map(len, trees))
        inputs = tree_inputs(trees, range(len(trees)), starts, count=count, context=context, device=DEVICE)
        qkv = self.tokens(count * len(trees))
        own = [slice(place * count, place * count + len(tree)) for place, tree in enumerate(trees)]
        expected = [self.plain(start, tree, qkv[rows]) for start, tree, rows in zip(starts, trees, own, strict=True)]
        for plan in plans:
            found = self.run(inputs, starts, qkv, plan)
            for rows, wanted, start in zip(own, expected, starts, strict=True):
                assert_same(found[rows], wanted, plan, start)

    def check_prompts(
        self,
        expected: Tensor,
        pieces: Sequence[tuple[int, int]],
        *,
        count: int = 0,
        context: int = 2048,
        plans: Sequence[AttentionPlan | None] = (None,),
    ) -> None:
        """Pieces (first, last) of the text, read at once by requests that have what comes before."""
        starts, sizes = [first for first, _ in pieces], [last - first for first, last in pieces]
        count = count or max(sizes)
        inputs = prompt_inputs(sizes, range(len(pieces)), starts, count=count, context=context, device=DEVICE)
        qkv = self.tokens(count * len(pieces))
        for place, (first, last) in enumerate(pieces):
            qkv[place * count : place * count + last - first] = self.qkv[first:last]
        for plan in plans:
            found = self.run(inputs, starts, qkv, plan)
            for place, (first, last) in enumerate(pieces):
                assert_same(found[place * count :][: last - first], expected[first:last], plan, first)


FEW_PLANS = [None, AttentionPlan(16, 0), AttentionPlan(32, 1, num_stages=1), AttentionPlan(64, GROUP_CHUNKS)]
ALL_PLANS = [AttentionPlan(*one) for one in product((16, 32, 64), (0, 1, GROUP_CHUNKS), (2, 4))]
SHAPES = [  # heads, heads of keys, head size, dtype: every size and group, every dtype where models are
    (2, 2, 16, torch.float32),
    (4, 2, 32, torch.bfloat16),
    (3, 1, 48, torch.float16),
    (9, 3, 64, torch.float32),
    (9, 3, 64, torch.float16),
    (8, 2, 96, torch.bfloat16),
    (16, 2, 128, torch.bfloat16),
    (8, 2, 128, torch.float16),
    (4, 2, 128, torch.float32),
    (8, 1, 256, torch.bfloat16),
    (2, 1, 256, torch.float32),
    (32, 1, 64, torch.bfloat16),
    (71, 1, 64, torch.bfloat16),
]


@pytest.mark.parametrize(("num_heads", "num_kv", "dim", "dtype"), SHAPES)
def test_attention_of_trees_chains_and_prompts(kernels, num_heads, num_kv, dim, dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    one = Attended(kernels, num_heads, num_kv, dim, dtype, 330)
    expected = one.read(0, 330)
    plans = FEW_PLANS if dim * dtype.itemsize <= 512 else [None]  # others would not fit into a processor
    mixed = [random_tree(1, 40, 3), chain(33), random_tree(2, 60), chain(1), random_tree(3, 3, 1)]
    one.check(mixed, [310, 250, 63, 128, 0], count=64, plans=plans)
    one.check([random_tree(4, 34, 2)], [255], plans=plans)
    one.check_prompts(expected, [(0, 200), (130, 330), (256, 320)], count=200, plans=[None, *plans[-1:]])


def test_attention_with_every_plan(kernels) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    one = Attended(kernels, 9, 3, 64, torch.bfloat16, 330)
    expected = one.read(0, 330)
    one.check([random_tree(5, 60, 3), chain(64), random_tree(6, 20)], [300, 190, 5], count=64, plans=ALL_PLANS)
    one.check_prompts(expected, [(0, 70), (250, 330)], plans=ALL_PLANS)


@pytest.mark.parametrize("size", [2, 3, 16, 17, 64, 65, 129])
def test_attention_of_any_number_of_tokens(kernels, size: int) -> None:  # type: ignore[no-untyped-def]
    """Chains, deep trees and flat ones at every kind of place in a chunk and in a group of chunks."""
    torch.manual_seed(0)
    one = Attended(kernels, 4, 2, 64, torch.bfloat16, 520)
    one.read(0, 520)
    for start in (0, 1, 63, 64, 200, 255, 256, 511):
        for tree in (chain(size), random_tree(start, size, 2), random_tree(start, size)):
            one.check([tree], [start])
            one.check([tree], [start], count=size + 5)


@pytest.mark.parametrize("sizes", [(1, 329), (64, 64, 202), (100, 7, 1, 222), (330,)])
def test_attention_of_prompts_in_pieces(kernels, sizes: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    one = Attended(kernels, 9, 3, 64, torch.bfloat16, 330)
    expected, first = one.read(0, 330), 0
    for size in sizes:
        one.check_prompts(expected, [(first, first + size)])
        one.check_prompts(expected, [(first, first + size)], count=size + 30)
        first += size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_long_texts(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Beyond the border of short contexts: checks of the same text are other programs there."""
    torch.manual_seed(0)
    length, start = 2250, 1990
    one = Attended(kernels, 4, 2, 64, dtype, length)
    layer = one.text
    inputs = prompt_inputs([start], [0], [0], device=DEVICE)
    kernels.rotate_store(Parts(one.qkv[:start]), layer, inputs.positions, inputs.slots, inputs.starts)
    expected = torch.cat((one.qkv.new_empty(start, 4 * 64), one.read(start, length)))
    trees = [random_tree(7, 33, 2), chain(20), random_tree(8, 33)]
    for context, starts in ((2048, (2048, 2000, 5)), (1 << 30, (2249, 2048, 5))):
        one.check(trees, starts, count=48, context=context, plans=FEW_PLANS)
        for place in starts:
            one.check([random_tree(place, 12)], [place], context=context)
    one.check_prompts(expected, [(2000, 2250), (2100, 2130)], context=1 << 30, plans=[None, FEW_PLANS[-1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_active", "size", "inner"),
    [(8, 2, 96, 80), (128, 8, 512, 192), (160, 4, 96, 80), (20, 1, 200, 40), (16, 4, 2048, 768)],
)
def test_routed_experts_of_any_number_of_tokens(  # type: ignore[no-untyped-def]
    kernels, dtype, is_normalized, num_experts, num_active, size, inner
) -> None:
    """Alone, beside others, and beside the same others in another order."""
    torch.manual_seed(0)
    num_tokens, norm = 300, Norm(random(size, dtype=dtype), EPS)
    x, delta = random(num_tokens, size, dtype=dtype), Parts(random(2, num_tokens, size), 2)
    router = (random(num_experts, size) / size**0.5).to(dtype)
    gate_up = (random(num_experts, 2 * inner, size) / size**0.5).to(dtype)
    experts = Experts(
        router, gate_up, (random(num_experts, size, inner) / inner**0.5).to(dtype), num_active, is_normalized
    )

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = Parts(delta.values[:, rows].contiguous(), 2)
        total, made = kernels.norm_routed_mlp(x[rows].contiguous(), parts, norm, experts)
        return total, made.values.view(num_active, len(rows), size).transpose(0, 1)

    order = torch.arange(num_tokens, device=DEVICE)
    alone = [torch.cat(part) for part in zip(*(run(order[row : row + 1]) for row in range(num_tokens)), strict=True)]
    for count in (2, 5, 16, 17, 64, 65, 300):
        for rows in (order[:count], order[:count].flip(0), order[-count:], torch.randperm(count, device=DEVICE)):
            for found, expected in zip(run(rows), alone, strict=True):
                assert_same(found, expected[rows], count)


NAMES = ["llama", "qwen2", "qwen3", "qwen3_moe"]
DTYPE_NAMES = ["bfloat16", "float16", "float32"]


@lru_cache(maxsize=12)
def find_llm(name: str, dtype: str, num_slots: int, token_budget: int) -> LLM:
    settings = {"device": "cuda", "dtype": dtype, "num_slots": num_slots, "token_budget": token_budget}
    return make_llm(name, drafter=make_dflash(name), **settings)


requests = st.tuples(
    st.text(ALPHABET[1:], min_size=1, max_size=100),
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        top_k=st.sampled_from([0, 0, 5, 20]),
        top_p=st.sampled_from([1.0, 1.0, 0.8]),
        seed=st.integers(0, 2**40),
        ignore_eos=st.booleans(),
    ),
    st.one_of(
        st.sampled_from(["ar", "fixed:2", "fixed:8", "tree:6", "tree:15", "tree:63"]),
        st.integers(0, 1000).map(RandomTreePilot),
    ),
)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_plain_decoding_alone(name: str, dtype: str) -> None:
    plain = find_llm(name, dtype, 1, 512)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(
        batch=st.lists(requests, min_size=1, max_size=7),
        num_slots=st.sampled_from([1, 3, 8]),
        token_budget=st.sampled_from([16, 64, 512]),
    )
    def check(batch: list[tuple[str, SamplingParams, object]], num_slots: int, token_budget: int) -> None:
        prompts, params, pilots = zip(*batch, strict=True)
        llm = find_llm(name, dtype, num_slots, token_budget)
        assert isinstance(llm.engine.runner, GpuTargetRunner)
        found = llm.generate(prompts, params, pilot=list(pilots), is_raw=True)
        for prompt, one, answer in zip(prompts, params, found, strict=True):
            assert answer.token_ids == plain.generate(prompt, one, pilot="ar", is_raw=True).token_ids

    check()


def find_runner(name: str, dtype: str, num_slots: int = 8) -> GpuTargetRunner:
    runner = make_llm(name, device="cuda", dtype=dtype, num_slots=num_slots).engine.runner
    assert isinstance(runner, GpuTargetRunner)
    return runner


def as_ids(text: str) -> list[int]:
    return [ALPHABET.index(char) for char in text]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_in_padded_graphs(name: str, dtype: str) -> None:
    """A check alone, rounded up to more tokens, among others in a bucket with spare rows, and in several passes."""
    runner = find_runner(name, dtype)
    texts = ["abcabcab", "the quick brown fox " * 4, "z", "hello " * 11, "Q" * 64]
    slots = [runner.cache.reserve() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        runner.prefill([(slot, as_ids(text))], ())
    shapes = [random_tree(0, 9, 3), chain(4), (-1,), random_tree(1, 21), random_tree(2, 3)]
    trees = [
        DraftTree.build(5, [(parent, (7 * node + slot) % 60) for node, parent in enumerate(shape) if node])
        for slot, shape in zip(slots, shapes, strict=True)
    ]

    def check(places: Sequence[int]) -> list[Tensor]:
        result = runner.verify([(slots[place], trees[place]) for place in places], ())
        return [
            result.logits[start : start + len(trees[place])].clone()
            for place, start in zip(places, result.row_starts, strict=True)
        ]

    alone = [check([place])[0] for place in range(5)]
    for places in ((0, 1, 2), (4, 3, 2, 1, 0), (2, 3), (0, 4, 1)):
        for place, found in zip(places, check(places), strict=True):
            assert_same(found, alone[place], places)
    runner.max_rows = 64
    for place, found in enumerate(check(range(5))):
        assert_same(found, alone[place], "in several passes")


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_behind_prompts_in_any_pieces(name: str, dtype: str) -> None:
    """Token by token in checks of one, in pieces, whole, and beside another prompt."""
    ids = as_ids("the quick brown fox jumps over the lazy dog " * 3)
    runner = find_runner(name, dtype)
    slots = [runner.cache.reserve() for _ in range(8)]
    for token_id in ids:
        expected = runner.verify([(slots[0], DraftTree.chain(token_id, []))], ()).logits[0].clone()
        runner.keep([(slots[0], [0])])
    for slot, sizes in zip(slots[1:], ((132,), (1, 131), (64, 65, 3), (5, 7, 100, 20)), strict=False):
        first = 0
        for size in sizes:
            found = runner.prefill([(slot, ids[first : first + size])], ()).logits[0]
            first += size
        assert_same(found, expected, sizes)
    found = runner.prefill([(slots[5], ids[:7]), (slots[6], ids), (slots[7], ids[:40])], ()).logits[1]
    assert_same(found, expected, "beside others")
