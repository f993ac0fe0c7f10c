"""The inputs of a pass of fixed shape, against what a tree says of itself."""

import numpy as np
import pytest
import torch

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import DraftRequest
from blockpilot.gpu.buckets import CONTEXTS, context_buckets
from blockpilot.gpu.plan import PassPlan

SPARE, LENGTHS = 5, [10, 20, 30, 40]
PARAMS = [SamplingParams(temperature=0.3 * i, seed=2**40 * i + i) for i in range(4)]
WORDS = [params.words for params in PARAMS]


def make_plan(num_requests: int, count: int) -> PassPlan:
    return PassPlan(num_requests, count, 2048, torch.device("cpu"), SPARE)


def make_block(
    slot: int, anchor_id: int, position: int, size: int, params: SamplingParams, limits: tuple[int, int] = (0, 0)
) -> DraftRequest:
    return DraftRequest(slot, anchor_id, position, size, 1, params, limits)


def random_tree(size: int, seed: int = 0) -> DraftTree:
    random = np.random.default_rng(seed)
    return DraftTree.build(7, [(int(random.integers(node)), int(random.integers(150_000))) for node in range(1, size)])


def read(plan: PassPlan) -> dict[str, np.ndarray]:
    """Arrays by name; masks as [request, token, bit]."""
    found = {name: array.copy() for name, array in plan.staging.host.items()}
    masks = found["masks"].view(np.uint8).reshape(plan.num_requests, plan.count, -1)
    shaped = {name: found[name].reshape(plan.num_requests, plan.count) for name in ("token_ids", "positions")}
    shaped["limits"] = found["limits"].reshape(plan.num_requests, 2)
    shaped["sampling"] = found["sampling"].reshape(3, plan.num_requests).T
    return found | shaped | {"masks": np.unpackbits(masks, axis=-1, bitorder="little")}


@pytest.mark.parametrize(("size", "count"), [(1, 1), (3, 4), (32, 32), (33, 48), (64, 64), (90, 96), (129, 129)])
def test_trees_of_all_sizes(size: int, count: int) -> None:
    plan, tree = make_plan(2, count), random_tree(size)
    plan.write_trees([(3, tree)], LENGTHS, [(7, -8, 9)])
    found = read(plan)
    assert found["slots"].tolist() == [3, SPARE] and found["starts"].tolist() == [40, 0]
    assert found["sampling"].tolist() == [[7, -8, 9], [0, 0, 0]]
    assert found["token_ids"][0, :size].tolist() == list(tree.token_ids)
    assert found["positions"][0].tolist() == [40 + depth for depth in tree.depths] + [40] * (count - size)
    np.testing.assert_array_equal(found["masks"][0, :size, :size], tree.ancestor_matrix())
    assert not found["masks"][0, :size, size:].any()
    assert (found["masks"][:, size:, 0] == 1).all() and (found["masks"][1].sum(axis=-1) == 1).all()


def test_trees_of_different_sizes_side_by_side() -> None:
    trees = [(slot, random_tree(size, seed=slot)) for slot, size in ((2, 5), (0, 12), (3, 1), (1, 7))]
    together = make_plan(4, 12)
    together.write_trees(trees, LENGTHS, WORDS[: len(trees)])
    for row, (tree, words) in enumerate(zip(trees, WORDS, strict=True)):
        alone = make_plan(1, 12)
        alone.write_trees([tree], LENGTHS, [words])
        for name, array in read(alone).items():
            np.testing.assert_array_equal(read(together)[name][row : row + 1], array)


def test_blocks_of_different_sizes_side_by_side() -> None:
    limits = [(15, 5), (3, 1), (0, 0)]
    places = [(1, 9, 23, 6), (3, 8, 41, 2), (0, 7, 11, 8)]
    blocks = [make_block(*place, PARAMS[row], limits[row]) for row, place in enumerate(places)]
    together = make_plan(4, 8)
    together.write_blocks(blocks, LENGTHS, 2)
    for row, block in enumerate(blocks):
        alone = make_plan(1, 8)
        alone.write_blocks([block], LENGTHS, 2)
        for name, array in read(alone).items():
            np.testing.assert_array_equal(read(together)[name][row : row + 1], array)


def test_nothing_is_left_of_the_pass_before() -> None:
    plan, fresh = make_plan(2, 64), make_plan(2, 64)
    plan.write_trees([(0, random_tree(60, seed=1)), (2, random_tree(64, seed=2))], LENGTHS, WORDS[:2])
    for one in (plan, fresh):
        one.write_trees([(1, random_tree(5))], LENGTHS, WORDS[:1])
    for name, array in read(plan).items():
        np.testing.assert_array_equal(array, read(fresh)[name])


def test_tokens_of_a_block_see_each_other() -> None:
    plan = make_plan(2, 8)
    plan.write_blocks([make_block(1, 9, 23, 6, PARAMS[0])], LENGTHS, 2)
    found = read(plan)
    assert found["token_ids"].tolist() == [[9] + [2] * 7, [2] * 8]
    assert found["positions"][0].tolist() == [23, 24, 25, 26, 27, 28, 23, 23] and found["starts"].tolist() == [20, 0]
    assert found["masks"][0, :6, :6].all() and not found["masks"][0, :6, 6:].any()


def test_noise_is_that_of_the_requests() -> None:
    plan = make_plan(2, 4)
    plan.write_trees([(1, random_tree(3)), (0, random_tree(4))], LENGTHS, WORDS[1:3])
    plan.staging.send()
    noise = plan.noise(1)
    assert noise.temperatures.tolist() == pytest.approx([0.3, 0.6]) and noise.shift == 1
    seeds = [int(low) & 0xFFFFFFFF | int(high) << 32 for low, high in noise.seeds.T]
    assert seeds == [2**40 + 1, 2**41 + 2]


def test_long_contexts_are_prepared_only_where_slots_are_long() -> None:
    assert context_buckets(1000) == CONTEXTS[:1] == context_buckets(2048 + MAX_TREE_NODES)
    assert context_buckets(2049 + MAX_TREE_NODES) == CONTEXTS
