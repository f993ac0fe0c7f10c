"""Trees grown and accepted by the GPU's kernels, against the reference."""

import pytest
import torch
from torch import Tensor

from blockpilot.core.draft import Draft
from blockpilot.gpu import reference
from blockpilot.gpu.interface import (
    REPORT,
    AcceptedRows,
    CheckedTrees,
    NextBlocks,
    PassInputs,
    TreeLimits,
    TreeRules,
)
from blockpilot.pilots.calibration import MAX_NEGATED, MAX_PROBABILITY, MIN_LOG_PROB
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.gpu
TEMPERATURES = (0.0, 0.7, 1.0)


@pytest.fixture(scope="module")
def kernels():  # type: ignore[no-untyped-def]
    from blockpilot.gpu import kernels as found

    return found


def random_blocks(num_requests: int, depth: int, width: int, *, is_pairwise: bool) -> Draft[Tensor]:
    """No two tokens of a request are equal, so that an id tells the position and the rank."""
    ids = torch.arange(num_requests * depth * width, device=DEVICE).view(num_requests, depth, width) + 100

    def scores(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=DEVICE) * 2).log_softmax(dim=-1)

    log_probs = scores(num_requests, depth, width).sort(dim=-1, descending=True).values
    pairs = (scores(num_requests, width), scores(num_requests, depth - 1, width, width)) if is_pairwise else ()
    return Draft(ids, log_probs, *pairs)


def random_weights(num_depths: int) -> Tensor:
    usual = torch.tensor([0.2, 0.9, 0.1, -0.1, -0.2, -0.1], device=DEVICE)
    return usual + torch.randn(2, num_depths, 6, device=DEVICE) / 10


def grow(module, blocks: Draft[Tensor], weights: Tensor | None, limits: Tensor, size: int, *, is_chain: bool):  # type: ignore[no-untyped-def]
    """Trees, parents and report; what was there before is overwritten."""
    num_requests = len(limits)
    number = torch.full((3, num_requests * size), -9, dtype=torch.int32, device=DEVICE)
    masks = number.new_full((num_requests * size, -(-size // 32)), -9)
    slots, (starts, branches) = number.new_zeros(num_requests), number.new_full((2, num_requests), -9)
    trees = PassInputs(number[0], number[1], slots, starts, masks, branches)
    parents = number[2].view(num_requests, size)
    report = torch.full((num_requests, REPORT), -9.0, device=DEVICE)
    temperatures = torch.tensor(TEMPERATURES[:num_requests], device=DEVICE)
    tokens = torch.arange(num_requests * 2 * 5, dtype=torch.int32, device=DEVICE).view(2, num_requests, 5) + 1000
    anchors, starts = tokens[0, :, 0], tokens[1, :, 0]  # columns, as in a block of tokens
    given = TreeLimits(temperatures, limits, anchors, starts)
    module.grow_trees(blocks, TreeRules(weights, is_chain), given, trees, parents, report)
    return trees, parents, report


def all_shares(blocks: Draft[Tensor], weights: Tensor | None, temperatures: Tensor) -> Tensor:
    """P(child | parent) [R, D, K, K] on a path that is right so far; the anchor is parent 0 of position 0."""
    num_requests, depth, width = blocks.log_probs.shape
    marginals = blocks.log_probs[:, :, None]  # [R, D, 1, K], the same after every parent
    scores = marginals.expand(num_requests, depth, width, width)
    if blocks.first is not None and blocks.pairwise is not None:
        first = blocks.first[:, None, None].expand(num_requests, 1, width, width)
        scores = torch.cat((first, blocks.pairwise), dim=1)
    if weights is None:
        return scores.exp()
    places = torch.arange(depth, device=weights.device).clamp(max=weights.shape[1] - 1)
    table = weights[(temperatures > 0).to(weights.device, torch.long)][:, places]  # [R, D, features]
    one, conditional, marginal, gap, child, parent = table[:, :, None, None].unbind(dim=-1)
    ranks = torch.arange(width, device=weights.device).float().log1p()
    scores = scores.clamp(min=MIN_LOG_PROB)
    logits = conditional * (scores - torch.log1p(-scores.exp().clamp(max=MAX_PROBABILITY)))
    logits = logits + one + child * ranks + parent * ranks[:, None] + marginal * marginals.clamp(min=MIN_LOG_PROB)
    logits = logits + gap * (scores.amax(dim=-1, keepdim=True) - scores)
    found = 1 / (1 + (-logits).clamp(max=MAX_NEGATED).exp())
    return found / found.sum(dim=-1, keepdim=True).clamp(min=1)  # siblings exclude each other


def path_probabilities(shares: Tensor, ids: Tensor, parents: Tensor) -> Tensor:
    """Of one tree's nodes [n], from the ids of `random_blocks`; 1 for the anchor and all that rounds up."""
    width = shares.shape[-1]
    paths, places = [], []
    for token_id, parent in zip(ids.tolist(), parents.tolist(), strict=True):
        if parent < 0:
            paths.append(1.0)
            places.append((-1, 0))
            continue
        position, rank = divmod((token_id - 100) % (len(shares) * width), width)
        above, row = places[parent]
        assert position == above + 1
        paths.append(paths[parent] * float(shares[position, row, rank]))
        places.append((position, rank))
    return torch.tensor(paths)


def ancestor_masks(parents: Tensor, num_words: int) -> Tensor:
    above = parents.tolist()
    number = [1 << node if parent >= 0 else 1 for node, parent in enumerate(above)]
    for node, parent in enumerate(above):
        number[node] |= number[parent] if parent >= 0 else 0
    words = [[bits >> 32 * word & 0xFFFFFFFF for word in range(num_words)] for bits in number]
    wide = torch.tensor(words)
    return wide.where(wide < 2**31, wide - 2**32).int()


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("num_depths", [0, 1, 4])
@pytest.mark.parametrize(
    ("num_requests", "depth", "width", "is_pairwise", "size"),
    [
        (1, 15, 16, True, 64),
        (3, 15, 16, True, 129),
        (2, 7, 5, True, 48),
        (2, 7, 8, False, 12),
        (3, 5, 4, True, 6),
        (1, 63, 3, True, 129),
        (2, 15, 1, False, 16),
        (2, 1, 4, True, 6),
        (1, 1, 16, False, 33),
        (2, 4, 3, True, 1),
    ],
)
def test_trees_are_those_of_the_reference(  # type: ignore[no-untyped-def]
    kernels, num_requests, depth, width, is_pairwise, size, num_depths, is_chain
) -> None:
    """Nodes whose paths differ by rounding alone may change places: their paths are compared, and how they connect."""
    torch.manual_seed(0)
    blocks = random_blocks(num_requests, depth, width, is_pairwise=is_pairwise)
    weights = random_weights(num_depths) if num_depths else None
    temperatures = torch.tensor(TEMPERATURES[:num_requests], device=DEVICE)
    shares = all_shares(blocks, weights, temperatures)
    for limits in ([(size - 1, depth)] * 3, [(200, 2), (5, depth), (0, 0)], [(7, 99), (0, 3), (3, 0)]):
        given = torch.tensor(limits[:num_requests], dtype=torch.int32, device=DEVICE)
        trees, parents, report = grow(kernels, blocks, weights, given, size, is_chain=is_chain)
        expected, expected_parents, expected_report = grow(reference, blocks, weights, given, size, is_chain=is_chain)
        torch.testing.assert_close(report, expected_report, rtol=1e-4, atol=1e-7)
        assert torch.equal(parents >= 0, expected_parents >= 0)
        for request in range(num_requests):
            own = slice(request * size, (request + 1) * size)
            ids, above = trees.token_ids[own], parents[request]
            found = path_probabilities(shares[request], ids, above)
            wanted = path_probabilities(shares[request], expected.token_ids[own], expected_parents[request])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-12)
            is_extra = above < 0
            is_extra[0] = False
            assert not ids[is_extra].any() and ids[0] == expected.token_ids[own][0]
            offsets = trees.positions[own] - expected.positions[own][0]
            places = (ids.long() - 100) % (depth * width) // width + 1
            assert torch.equal(offsets.long(), places.where(above >= 0, 0))
            assert torch.equal(trees.masks[own].cpu(), ancestor_masks(above, trees.masks.shape[1]))
            assert bool(trees.branches[request]) == (int(offsets.max()) < int((above >= 0).sum()))


@pytest.mark.parametrize("size", [12, 129])
def test_equal_paths_come_in_the_order_of_their_age(kernels, size: int) -> None:  # type: ignore[no-untyped-def]
    blocks = random_blocks(2, 5, 3, is_pairwise=False)
    even = Draft(blocks.token_ids, torch.full_like(blocks.log_probs, -1.1))
    limits = torch.tensor([[size - 1, 5], [size - 3, 4]], dtype=torch.int32, device=DEVICE)
    found, expected = (grow(module, even, None, limits, size, is_chain=False) for module in (kernels, reference))
    for name in ("token_ids", "positions", "masks", "branches"):
        assert torch.equal(getattr(found[0], name), getattr(expected[0], name))
    assert torch.equal(found[1], expected[1])


def test_impossible_tokens_are_taken_last(kernels) -> None:  # type: ignore[no-untyped-def]
    """A path of probability 0 is a path, as on the host."""
    blocks = random_blocks(1, 3, 4, is_pairwise=False)
    blocks.log_probs[:, :, 2:] = float("-inf")
    limits = torch.tensor([[24, 3]], dtype=torch.int32, device=DEVICE)
    found, expected = (grow(module, blocks, None, limits, 25, is_chain=False) for module in (kernels, reference))
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0].token_ids, expected[0].token_ids)
    assert bool((found[1][0, 1:] >= 0).all())


@pytest.mark.parametrize(
    ("num_requests", "size", "num_rows"), [(1, 64, 16), (3, 129, 16), (2, 6, 6), (2, 1, 1), (3, 48, 40)]
)
def test_accepted_paths_are_those_of_the_reference(  # type: ignore[no-untyped-def]
    kernels, num_requests: int, size: int, num_rows: int
) -> None:
    """Trees of any shape, some with equal siblings, some with tokens that only round up."""
    torch.manual_seed(0)
    longest = 0
    for attempt in range(10):
        parents = (torch.rand(num_requests, size, device=DEVICE) * torch.arange(size, device=DEVICE)).int()
        parents[:, 0] = -1
        if attempt % 2:
            parents[:, size // 2 :] = -1
        ids = torch.randint(0, 2, (num_requests * size,), dtype=torch.int32, device=DEVICE)
        best = torch.randint(0, 2, (num_requests * size,), device=DEVICE)
        starts = torch.tensor([40, 0, 7], dtype=torch.int32, device=DEVICE)[:num_requests]
        results = []
        for module in (kernels, reference):
            flat = torch.full((2, num_requests * num_rows), -9, dtype=torch.int32, device=DEVICE)
            paths = flat.new_full((num_requests, num_rows + 3), -9)
            counts, accepted = flat.new_full((num_requests,), -9), flat.new_full((num_requests, 1 + num_rows), -9)
            blocks = next_blocks(num_requests, num_rows)
            checked = CheckedTrees(best, ids, parents, starts)
            module.accept_trees(checked, AcceptedRows(paths, counts, flat[0], flat[1]), accepted, blocks)
            written = blocks.next_ids, blocks.next_positions, blocks.next_starts
            results.append((paths, counts, flat, accepted, *written))
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)
        longest = max(longest, int(results[0][1].max()))
    assert longest > 3 or size < 10


def next_blocks(num_requests: int, num_rows: int, spare_slot: int = 0) -> NextBlocks:
    slots = torch.arange(num_requests, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(num_requests * num_rows, dtype=torch.int32, device=DEVICE) + 70
    written = [torch.full_like(part, -9) for part in (positions, positions, slots)]
    return NextBlocks(slots, positions, spare_slot, *written)


def test_the_host_reads_what_was_written_into_its_memory(kernels) -> None:  # type: ignore[no-untyped-def]
    """Trees, report and accepted tokens in pinned memory."""
    torch.manual_seed(0)
    is_pinned = DEVICE.type == "cuda"
    blocks, limits = random_blocks(1, 4, 4, is_pairwise=True), torch.tensor([[11, 4]], dtype=torch.int32, device=DEVICE)
    expected, parents, report = grow(reference, blocks, None, limits, 12, is_chain=False)

    def on_host(like: Tensor) -> Tensor:
        return torch.full(like.shape, -9, dtype=like.dtype, pin_memory=is_pinned)

    parts = expected.token_ids, expected.positions, expected.slots, expected.starts, expected.masks, expected.branches
    trees = PassInputs(*map(on_host, parts))
    own_parents, own_report = torch.empty_like(parents), on_host(report)
    anchors = expected.token_ids[:1]
    given = TreeLimits(torch.zeros(1, device=DEVICE), limits, anchors, expected.positions[:1])
    kernels.grow_trees(blocks, TreeRules(None, is_chain=False), given, trees, own_parents, own_report)
    best = torch.full((12,), 5, device=DEVICE)
    accepted, flat = on_host(parents.new_empty(1, 6)), parents.new_empty(2, 5)
    following = next_blocks(1, 5, spare_slot=9)
    numbers = [on_host(part) for part in (following.next_ids, following.next_positions, following.next_starts)]
    checked = CheckedTrees(best, expected.token_ids, own_parents, limits[:, 0])
    kept = AcceptedRows(flat[:1], flat[1, :1], flat[0], flat[1])
    kernels.accept_trees(checked, kept, accepted, NextBlocks(following.slots, following.positions, 9, *numbers))
    if is_pinned:
        torch.cuda.synchronize()
    for name in ("token_ids", "positions", "masks", "starts", "branches"):
        assert torch.equal(getattr(trees, name), getattr(expected, name).cpu())
    assert torch.equal(own_parents, parents)
    torch.testing.assert_close(own_report, report.cpu(), rtol=1e-4, atol=1e-7)
    assert accepted.tolist() == [[1, 5, 0, 0, 0, 0]]
    assert numbers[0][0] == 5 and numbers[1].tolist() == (following.positions + 1).tolist()
    assert numbers[2].tolist() == [12]
