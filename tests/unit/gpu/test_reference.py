"""Trees grown and accepted by the reference of the GPU's kernels, against what pilots grow and decoding accepts."""

import numpy as np
import pytest
import torch
from blockpilot.core.candidates import Candidates
from blockpilot.models.trees_reference import HEAD, REPORT, Blocks, NextBlocks, Trees, accept_trees, grow_trees
from torch import Tensor

from blockpilot.core.tree import DraftTree
from blockpilot.decoding.verification import accept
from blockpilot.models import kernels_reference, trees_reference
from blockpilot.pilots import calibration
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.forecast import HEAD as PILOTS_HEAD
from blockpilot.pilots.growth import falling_costs, grow_calibrated, grow_chain, grow_tree
from tests.unit.pilots.pieces import random_candidates

SIZE, ANCHOR, START = 40, 7, 1000
WEIGHTS = torch.tensor(
    [
        [[0.3, 0.8, 0.1, -0.2, -0.3, -0.1], [0.1, 0.7, 0.2, -0.1, -0.2, 0.1]],
        [[0.1, 1.1, 0.0, -0.1, 0.2, 0.1], [1.4, 0.9, 0.3, 0.2, -0.1, 0.0]],
    ]
)


def make_blocks(candidates: list[Candidates]) -> Blocks:
    def stacked(name: str) -> Tensor:
        return torch.stack([torch.from_numpy(getattr(one, name)) for one in candidates])

    is_pairwise = candidates[0].pairwise is not None
    pairs = (stacked("first"), stacked("pairwise")) if is_pairwise else (None, None)
    return Blocks(stacked("token_ids"), stacked("log_probs"), *pairs)


def grow(
    blocks: Blocks,
    limits: list[tuple[int, int]],
    weights: Tensor | None,
    temperatures: list[float],
    *,
    is_chain: bool = False,
    size: int = SIZE,
) -> tuple[list[DraftTree], Trees, Tensor]:
    """All requests have the same anchor; the trees as decoding knows them, what was written, and the report."""
    count = len(limits)
    ids, positions, parents = torch.full((3, count * size), -9, dtype=torch.int32)
    masks, parents = ids.new_full((count * size, -(-size // 32)), -9), parents.view(count, size)
    trees = Trees(ids, positions, masks, starts := ids.new_full((count,), -9))
    report = torch.full((count, REPORT), -9.0)
    given = torch.tensor([[ANCHOR, START]] * count, dtype=torch.int32)
    numbers = torch.tensor(temperatures), torch.tensor(limits, dtype=torch.int32), given[:, 0], given[:, 1]
    grow_trees(blocks, weights, *numbers, trees, parents, report, is_chain=is_chain)
    assert starts.tolist() == [START] * count
    found = []
    for request in range(count):
        above = parents[request].tolist()
        length = 1 + sum(parent >= 0 for parent in above)
        assert above[0] == -1 and above[length:] == [-1] * (size - length)
        own = ids.view(count, size)[request].tolist()
        assert own[length:] == [0] * (size - length)
        found.append(DraftTree.build(own[0], list(zip(above[1:length], own[1:length], strict=True))))
    return found, trees, report


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("is_pairwise", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_calibrated_trees_are_those_of_the_pilots(is_chain: bool, is_pairwise: bool, temperature: float) -> None:
    candidates = [random_candidates(seed, depth=6, width=5, is_pairwise=is_pairwise) for seed in range(4)]
    limits = [(39, 6), (12, 3), (1, 6), (5, 2)]
    found, _, report = grow(make_blocks(candidates), limits, WEIGHTS, [temperature] * 4, is_chain=is_chain)
    own = Calibration(WEIGHTS[int(temperature > 0)].numpy())
    for one, tree, told, (nodes, depth) in zip(candidates, found, report.tolist(), limits, strict=True):
        growth, head = grow_calibrated(
            one, own, falling_costs(nodes), trust=1.0, depth=depth, width=5, is_chain=is_chain
        )
        assert tree == growth.tree(ANCHOR)  # with these seeds no two paths are nearly equal
        assert told[:2] == [len(tree), growth.depth]
        assert told[2] == pytest.approx(growth.promised, rel=1e-5)
        assert told[3:] == pytest.approx([*list(head)[:HEAD], *[0.0] * (HEAD - depth)], rel=1e-5)


@pytest.mark.parametrize("is_pairwise", [False, True])
def test_without_weights_scores_are_taken_at_their_word(is_pairwise: bool) -> None:
    candidates = [random_candidates(seed, depth=7, width=4, is_pairwise=is_pairwise) for seed in range(3)]
    blocks, limits = make_blocks(candidates), [(39, 7), (20, 7), (4, 7)]
    trees, _, report = grow(blocks, limits, None, [0.0] * 3)
    chains, *_ = grow(blocks, limits, None, [0.0] * 3, is_chain=True)
    for one, tree, chain, (nodes, _) in zip(candidates, trees, chains, limits, strict=True):
        assert tree == DraftTree.build(ANCHOR, grow_tree(one, nodes))
        assert chain == DraftTree.build(ANCHOR, grow_chain(one, nodes))
    assert report[:, 1].tolist() == [float(tree.max_depth) for tree in trees]


def test_equal_paths_come_in_the_order_of_their_age() -> None:
    log_probs = np.full((4, 3), np.log(1 / 3), np.float32)
    candidates = Candidates(np.arange(12).reshape(4, 3), log_probs)
    for nodes in (4, 30):
        found, *_ = grow(make_blocks([candidates]), [(nodes, 4)], None, [0.0])
        assert found[0] == DraftTree.build(ANCHOR, grow_tree(candidates, nodes))


@pytest.mark.parametrize("size", [1, 6, 33, 129])
def test_what_a_check_reads(size: int) -> None:
    """Positions, ancestors, and tokens that only round up."""
    candidates = [random_candidates(seed, depth=9, width=6) for seed in range(3)]
    limits = [(200, 9), (3, 9), (0, 9)]
    found, trees, _ = grow(make_blocks(candidates), limits, WEIGHTS, [0.0, 0.5, 0.0], size=size)
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
    found, _, report = grow(make_blocks([random_candidates(1)]), [limits], WEIGHTS, [0.0])
    assert found == [DraftTree.chain(ANCHOR, [])]
    assert report[0, :3].tolist() == [1, 0, 0]
    assert (report[0, 3:] > 0).tolist() == [limits[1] > 0] * HEAD


def test_drafters_of_one_position_or_one_token() -> None:
    for depth, width in ((1, 4), (5, 1), (1, 1)):
        candidates = random_candidates(3, depth=depth, width=width)
        plain = random_candidates(3, depth=depth, width=width, is_pairwise=False)
        for one in (candidates, plain):
            found, *_ = grow(make_blocks([one]), [(30, depth)], None, [0.0])
            assert found[0] == DraftTree.build(ANCHOR, grow_tree(one, 30))


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
        accept_trees(best, ids.view(-1), parents, starts.int(), paths, counts, rows, positions, accepted, blocks)
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


def test_numbers_that_pilots_define_too() -> None:
    """Models stand below pilots and cannot ask them."""
    assert HEAD == PILOTS_HEAD
    for name in ("MIN_LOG_PROB", "MAX_PROBABILITY", "MAX_NEGATED"):
        assert getattr(trees_reference, name) == getattr(calibration, name)


def test_the_reference_offers_both() -> None:
    assert kernels_reference.grow_trees is grow_trees and kernels_reference.accept_trees is accept_trees
