"""Trees grown and accepted by the reference of the GPU's kernels, against what pilots grow and decoding accepts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.verification import accept
from blockpilot.gpu.interface import REPORT, AcceptedRows, CheckedTrees, NextBlocks, PassInputs, TreeLimits, TreeRules
from blockpilot.gpu.reference import accept_trees, grow_trees
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.forecast import HEAD
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_tree
from tests.unit.pilots.pieces import random_draft

SIZE, ANCHOR, START = 40, 7, 1000
WEIGHTS = torch.tensor(
    [
        [[0.3, 0.8, 0.1, -0.2, -0.3, -0.1], [0.1, 0.7, 0.2, -0.1, -0.2, 0.1]],
        [[0.1, 1.1, 0.0, -0.1, 0.2, 0.1], [1.4, 0.9, 0.3, 0.2, -0.1, 0.0]],
    ]
)


def stack(drafts: list[HostDraft]) -> Draft[Tensor]:
    parts = zip(*(draft.arrays for draft in drafts), strict=True)
    return Draft(*(torch.stack([torch.from_numpy(part) for part in each]) for each in parts))


def grow(
    draft: Draft[Tensor],
    limits: list[tuple[int, int]],
    weights: Tensor | None,
    temperatures: list[float],
    *,
    is_chain: bool = False,
    size: int = SIZE,
) -> tuple[list[DraftTree], PassInputs, Tensor]:
    """All requests have the same anchor; the trees as decoding knows them, what was written, and the report."""
    count = len(limits)
    ids, positions, parents = torch.full((3, count * size), -9, dtype=torch.int32)
    masks, parents = ids.new_full((count * size, -(-size // 32)), -9), parents.view(count, size)
    starts, branches = ids.new_full((2, count), -9)
    trees = PassInputs(ids, positions, ids.new_zeros(count), starts, masks, branches)
    report = torch.full((count, REPORT), -9.0)
    given = torch.tensor([[ANCHOR, START]] * count, dtype=torch.int32)
    numbers = torch.tensor(temperatures), torch.tensor(limits, dtype=torch.int32), given[:, 0], given[:, 1]
    grow_trees(draft, TreeRules(weights, is_chain), TreeLimits(*numbers), trees, parents, report)
    assert starts.tolist() == [START] * count
    found = []
    for request in range(count):
        above = parents[request].tolist()
        length = 1 + sum(parent >= 0 for parent in above)
        assert above[0] == -1 and above[length:] == [-1] * (size - length)
        own = ids.view(count, size)[request].tolist()
        assert own[length:] == [0] * (size - length)
        found.append(DraftTree.build(own[0], list(zip(above[1:length], own[1:length], strict=True))))
    assert branches.tolist() == [int(not tree.is_chain) for tree in found]
    return found, trees, report


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_are_grown_as_pilots_do_within_their_limits(is_chain: bool, temperature: float) -> None:
    drafts = [random_draft(seed, depth=6, width=5) for seed in range(4)]
    limits = [(39, 6), (12, 3), (1, 6), (5, 2)]
    found, _, report = grow(stack(drafts), limits, WEIGHTS, [temperature] * 4, is_chain=is_chain)
    own = Calibration(WEIGHTS[int(temperature > 0)].numpy())
    for one, tree, told, (nodes, depth) in zip(drafts, found, report.tolist(), limits, strict=True):
        grown = grow_tree(one, ANCHOR, GrowthRules(falling_costs(nodes), depth, own, is_chain=is_chain))
        assert tree == grown.tree and told[:2] == [len(tree), tree.max_depth]
        assert told[2:] == pytest.approx([grown.promised, *grown.head, *[0.0] * (HEAD - len(grown.head))], rel=1e-5)


@pytest.mark.parametrize("size", [1, 6, 33, 129])
def test_what_a_check_reads(size: int) -> None:
    """Positions, ancestors, and tokens that only round up."""
    candidates = [random_draft(seed, depth=9, width=6) for seed in range(3)]
    limits = [(200, 9), (3, 9), (0, 9)]
    found, trees, _ = grow(stack(candidates), limits, WEIGHTS, [0.0, 0.5, 0.0], size=size)
    words = trees.masks.view(3, size, -1).numpy().view(np.uint32)
    for request, (tree, (nodes, _)) in enumerate(zip(found, limits, strict=True)):
        assert len(tree) == 1 + min(nodes, size - 1)
        extra = size - len(tree)
        positions = trees.positions.view(3, size)[request].tolist()
        assert positions == [START + depth for depth in tree.depths] + [START] * extra
        expected = np.zeros((size, size), dtype=bool)
        expected[:, 0] = True
        expected[: len(tree), : len(tree)] = tree.ancestor_matrix()
        bits = np.unpackbits(words[request].view(np.uint8), axis=1, bitorder="little").astype(bool)
        assert np.array_equal(bits[:, :size], expected) and not bits[:, size:].any()


@pytest.mark.parametrize("limits", [(0, 0), (0, 5), (5, 0)])
def test_nothing_is_grown_without_room(limits: tuple[int, int]) -> None:
    found, _, report = grow(stack([random_draft(1)]), [limits], WEIGHTS, [0.0])
    assert found == [DraftTree.chain(ANCHOR, [])]
    assert report[0, :3].tolist() == [1, 0, 0]
    assert (report[0, 3:] > 0).tolist() == [limits[1] > 0] * HEAD


def random_tree(random: np.random.Generator, num_nodes: int, num_ids: int) -> DraftTree:
    """Any shape; some siblings are equal."""
    parents = [int(random.integers(0, node)) for node in range(1, num_nodes + 1)]
    return DraftTree.build(5, [(parent, int(random.integers(0, num_ids))) for parent in parents])


def test_accepted_paths_are_those_of_decoding() -> None:
    random = np.random.default_rng(0)
    size, num_rows, width = 24, 20, 30
    lengths = []
    for _ in range(20):
        trees = [random_tree(random, num_nodes, 2) for num_nodes in (23, 9, 0)]
        best = torch.from_numpy(random.integers(0, 2, size=3 * size))
        ids, parents = torch.zeros(3, size, dtype=torch.int32), torch.full((3, size), -1, dtype=torch.int32)
        for request, tree in enumerate(trees):
            ids[request, : len(tree)], parents[request, : len(tree)] = torch.tensor([tree.token_ids, tree.parents])
        paths, counts = torch.full((3, width), -9, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        rows, positions = torch.full((2, 3 * num_rows), -9, dtype=torch.int32)
        accepted, starts = torch.full((3, 1 + num_rows), -9, dtype=torch.int32), torch.tensor([4, 50, 0])
        before = torch.arange(3 * num_rows, dtype=torch.int32)
        next_ids, next_positions = torch.full((2, 3 * num_rows), -9, dtype=torch.int32)
        next_starts = torch.full((3,), -9, dtype=torch.int32)
        blocks = NextBlocks(torch.tensor([5, 8, 9]), before, 8, next_ids, next_positions, next_starts)
        checked = CheckedTrees(best, ids.view(-1), parents, starts.int())
        kept = AcceptedRows(paths, counts, rows, positions)
        accept_trees(checked, kept, accepted, blocks)
        for request, tree in enumerate(trees):
            expected = accept(tree, best[request * size : (request + 1) * size].tolist())
            length = len(expected.path)
            lengths.append(length)
            assert counts[request] == length
            assert paths[request].tolist() == [*expected.path, *[0] * (width - length)]
            anchor, own = request * size, slice(request * num_rows, (request + 1) * num_rows)
            assert rows[own].tolist() == [anchor + node for node in expected.path] + [anchor] * (num_rows - length)
            assert positions[own].tolist() == list(range(int(starts[request]), int(starts[request]) + num_rows))
            assert accepted[request].tolist() == [length, *expected.emitted_ids, *[0] * (num_rows - length)]
            shift = 0 if request == 1 else length  # the second is in the spare slot
            assert next_ids[own].tolist() == [expected.emitted_ids[-1], *[-9] * (num_rows - 1)]
            assert next_positions[own].tolist() == (before[own] + shift).tolist()
            assert next_starts[request] == starts[request] + shift
    assert max(lengths) > 3 and min(lengths) == 1
