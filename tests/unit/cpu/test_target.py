"""Passes in 8-bit integers: close to float32, and the same bits whatever shares them."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.probe_passes import path_to
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.decoding.target import TargetRunner
from blockpilot.models.decoder import Decoder
from blockpilot.models.noise import gumbel_noise
from blockpilot.models.packing import pack_linears
from tests.coded import make_codes
from tests.tiny import CODED, CONFIGS, VOCAB_SIZE, make_decoder, make_placement
from tests.unit.cpu.pieces import (
    draw_ids,
    draw_tree,
    fill,
    make_runner,
    packed_decoder,
    read_plainly,
    read_tree,
    seeds,
)

every_target = pytest.mark.parametrize("name", CODED)


@every_target
@pytest.mark.parametrize(("make", "limits"), [(make_decoder, (0.25, 0.08)), (packed_decoder, (0.07, 0.016))])
def test_logits_and_taps_lie_near_those_of_pytorch(
    name: str, make: Callable[[str], Decoder], limits: tuple[float, float]
) -> None:
    """With the weights that the codes stand for, and closer where inputs of products are rounded as well."""
    random, ours, theirs = Random(0), make_runner(name), TargetRunner(make(name), make_placement())
    ids, tree = draw_ids(random, 70), draw_tree(random, 30)
    found, expected = [], []
    for runner, results in ((ours, found), (theirs, expected)):
        slot = runner.cache.reserve()
        results.append(runner.prefill([(slot, ids[:40]), (runner.cache.reserve(), ids[::-1])], ()))
        runner.prefill([(slot, ids[40:])], ())
        results.append(runner.verify([(slot, tree)], (2, 0)))
    for one, other in zip(found, expected, strict=True):
        pairs = torch.stack((one.logits.flatten(), other.logits.flatten()))
        assert pairs.corrcoef()[0, 1] > 0.98 and one.logits.shape == other.logits.shape
    hidden_size = CONFIGS[name].hidden_size
    assert found[0].hidden is not None and found[0].hidden.shape == (2, hidden_size)
    taps = [result.taps.view(-1, 2, hidden_size) for result in (found[1], expected[1]) if result.taps is not None]
    off = (taps[0] - taps[1]).norm(dim=(0, 2)) / taps[1].norm(dim=(0, 2))
    assert off[0] < limits[0] and off[1] < limits[1], "the last layer comes first"


@every_target
def test_rows_are_those_of_every_cache(name: str) -> None:
    """Keys lie side by side inside, and nobody sees it."""
    ours, theirs = make_runner(name), TargetRunner(packed_decoder(name), make_placement())
    ids = draw_ids(Random(1), 40)
    for runner in (ours, theirs):
        runner.prefill([(runner.cache.reserve(), ids)], ())
    found, expected = (runner.cache.copy_rows(0, 3, 37) for runner in (ours, theirs))
    assert found.shape == expected.shape
    torch.testing.assert_close(found[0].float(), expected[0], rtol=1e-3, atol=1e-3)


@every_target
@settings(deadline=None, max_examples=50)
@given(
    requests=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=3),
    seed=seeds,
)
def test_nodes_of_trees_have_the_bits_of_plain_passes(name: str, requests: list[tuple[int, int]], seed: int) -> None:
    """Also what follows behind a path that was kept."""
    random, runner = Random(seed), make_runner(name)
    texts = [fill(runner, random, length) for length, _ in requests]
    trees = [draw_tree(random, count) for _, count in requests]
    expected = [read_tree(runner, ids, tree) for (_, ids), tree in zip(texts, trees, strict=True)]
    result = runner.verify([(slot, tree) for (slot, _), tree in zip(texts, trees, strict=True)], ())
    for start, tree, rows in zip(result.row_starts, trees, expected, strict=True):
        assert torch.equal(result.logits[start : start + len(tree)], rows)
    assert result.best_ids() == result.logits.argmax(dim=-1).tolist()
    paths = [path_to(tree, random.randrange(len(tree))) for tree in trees]
    runner.keep([(slot, path) for (slot, _), path in zip(texts, paths, strict=True)])
    slot, (own, ids), tree, path = runner.cache.reserve(), texts[0], trees[0], paths[0]
    kept, following = [tree.token_ids[node] for node in path], draw_ids(random, 3)
    alone = read_plainly(runner, slot, [*ids, *kept, *following])
    assert torch.equal(read_plainly(runner, own, following), alone[-3:])
    assert torch.equal(runner.cache.copy_rows(own, 0, len(alone)), runner.cache.copy_rows(slot, 0, len(alone)))


@every_target
@settings(deadline=None, max_examples=50)
@given(pieces=st.lists(st.lists(st.integers(1, 45), min_size=1, max_size=3), min_size=1, max_size=3), seed=seeds)
def test_prompts_may_be_cut_anywhere(name: str, pieces: list[list[int]], seed: int) -> None:
    random, runner = Random(seed), make_runner(name)
    texts = [(runner.cache.reserve(), draw_ids(random, sum(own))) for own in pieces]
    ends: dict[int, torch.Tensor] = {}
    for turn in range(3):
        chunks = [
            (slot, ids[sum(own[:turn]) : sum(own[: turn + 1])])
            for (slot, ids), own in zip(texts, pieces, strict=True)
            if turn < len(own)
        ]
        if chunks:
            ends |= zip((slot for slot, _ in chunks), runner.prefill(chunks, ()).logits, strict=True)
    plain = runner.cache.reserve()
    for slot, ids in texts:
        runner.cache.reset(plain)
        assert torch.equal(read_plainly(runner, plain, ids)[-1], ends[slot])
        assert torch.equal(runner.cache.copy_rows(plain, 0, len(ids)), runner.cache.copy_rows(slot, 0, len(ids)))


def test_a_long_context_is_seen_by_few_queries_at_a_time() -> None:
    """So that their scores stay in a processor's cache: runs of tokens are shorter than before."""
    random, runner = Random(3), make_runner("qwen3_moe-int8", context_length=3000, num_threads=2)
    slot, ids = fill(runner, random, 2900)
    plain = runner.cache.reserve()
    expected = read_plainly(runner, plain, ids)
    assert torch.equal(runner.cache.copy_rows(slot, 0, 2900), runner.cache.copy_rows(plain, 0, 2900))
    tree = draw_tree(random, 30)
    found = runner.verify([(slot, tree), (plain, DraftTree.chain(5, ids[:20]))], ()).logits
    chain = read_plainly(runner, plain, [5, *ids[:20]])
    assert torch.equal(found[30:], chain) and torch.equal(found[0], read_plainly(runner, slot, tree.token_ids[:1])[0])
    runner.cache.reset(plain)
    assert torch.equal(runner.prefill([(plain, ids)], ()).logits[0], expected[-1])


@every_target
def test_threads_change_no_bit(name: str) -> None:
    found = []
    for num_threads in (1, 2, 3):
        random, runner = Random(4), make_runner(name, num_threads=num_threads)
        slots = [fill(runner, random, length)[0] for length in (90, 3, 33)]
        result = runner.verify([(slot, draw_tree(random, 25)) for slot in slots], (1,))
        assert result.taps is not None
        found.append((result.logits, result.taps.clone(), result.best))
    assert all(torch.equal(one[0], found[0][0]) and torch.equal(one[1], found[0][1]) for one in found)
    assert all(one[2] == found[0][2] for one in found)


def test_taps_are_shown_of_prompts_and_left_of_checks() -> None:
    random, runner = Random(5), make_runner()
    shown: list[Observation] = []
    ids, others = draw_ids(random, 20), draw_ids(random, 7)
    first, second = runner.cache.reserve(), runner.cache.reserve()
    runner.prefill([(first, ids), (second, others)], (0, 2), show=shown.extend)
    assert [(one.slot, one.token_ids, one.rows) for one in shown] == [(first, ids, None), (second, others, None)]
    kept = [one.taps.clone() for one in shown if one.taps is not None]
    runner.cache.reset(first)
    result = runner.verify([(first, DraftTree.chain(ids[0], ids[1:]))], (0, 2))
    assert result.taps is not None and torch.equal(result.taps, kept[0]) and kept[1].shape == (7, 2 * 64)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_tokens_are_sampled_as_everywhere(temperature: float) -> None:
    random, runner = Random(6), make_runner()
    slot, ids = fill(runner, random, 30)
    params = SamplingParams(temperature=temperature, seed=11)
    tree = draw_tree(random, 100)
    logits = runner.verify([(slot, tree)], ()).logits
    result = runner.verify([(slot, tree)], (), [params])
    expected = choose_tokens(logits, params, [len(ids) + depth + 1 for depth in tree.depths]).tolist()
    assert result.best is not None and len(result.logits) == 0
    assert sum(a == b for a, b in zip(result.best, expected, strict=True)) >= 98


def test_noise_alone_chooses_among_equals() -> None:
    decoder = make_decoder("llama-untied-int8")
    decoder.lm_head.block_codes = (make_codes(torch.zeros(VOCAB_SIZE, 64), "centred"),)  # type: ignore[assignment]
    pack_linears(decoder, "int8")
    runner = make_runner(decoder=decoder)
    slot = runner.cache.reserve()
    same = total = 0
    for seed in (0, 7, 2**40, 2**63 - 1):
        tree = DraftTree.chain(3, draw_ids(Random(seed), 99))
        result = runner.verify([(slot, tree)], (), [SamplingParams(temperature=0.8, seed=seed)])
        expected = gumbel_noise(seed, range(1, 101), vocab_size=VOCAB_SIZE).argmax(dim=-1).tolist()
        assert result.best is not None
        same += sum(a == b for a, b in zip(result.best, expected, strict=True))
        total += 100
    assert same >= 0.99 * total
    greedy = runner.verify([(slot, DraftTree.chain(3, [4]))], ())
    assert greedy.best == [0, 0], "the first of equals"


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_the_first_of_equals_is_chosen(num_threads: int, temperature: float) -> None:
    """Whichever thread finds it in whichever lane. Noise is too small to choose between others."""
    decoder, random = make_decoder("llama-untied-int8"), Random(7)
    ids = [random.randrange(9) for _ in range(VOCAB_SIZE)]
    decoder.lm_head.block_codes = (decoder.lm_head.block_codes[0].rows(np.array(ids)),)  # type: ignore[assignment, index]
    pack_linears(decoder, "int8")
    runner = make_runner(decoder=decoder, num_threads=num_threads)
    slot, tree = runner.cache.reserve(), DraftTree.chain(1, draw_ids(random, 60))
    expected = runner.verify([(slot, tree)], ()).logits.numpy().argmax(axis=1).tolist()
    found = runner.verify([(slot, tree)], (), [SamplingParams(temperature=temperature)]).best
    assert found is not None and all(token == ids.index(ids[token]) for token in expected)
    if temperature == 0.0:
        assert found == expected
    else:
        assert [ids[token] for token in found] == [ids[token] for token in expected]


def test_requests_of_a_batch_sample_as_they_do_alone() -> None:
    random, runner = Random(8), make_runner()
    params = [SamplingParams(temperature=t, seed=s) for t, s in ((0.0, 1), (1.5, 2), (0.7, 3), (1.5, 4))]
    trees = [(fill(runner, random, 9)[0], draw_tree(random, 12)) for _ in params]
    together = runner.verify(trees, (), params)
    alone = [runner.verify([tree], (), [one]).best for tree, one in zip(trees, params, strict=True)]
    assert together.best == [token for best in alone if best is not None for token in best]
    prompts = [draw_ids(random, count) for count in (5, 17, 40, 2)]
    for slot, _ in trees:
        runner.cache.reset(slot)
    together = runner.prefill(list(zip(range(4), prompts, strict=True)), (), params)
    for slot, one in enumerate(params):
        runner.cache.reset(slot)
        alone = runner.prefill([(slot, prompts[slot])], (), [one])
        assert alone.best == together.best[slot : slot + 1]  # type: ignore[index]
        assert choose_tokens(alone.logits, one, [len(prompts[slot])]).tolist() == alone.best


def test_logits_come_where_tokens_are_filtered() -> None:
    runner = make_runner()
    slot, _ = fill(runner, Random(9), 5)
    tree = DraftTree.chain(1, [2, 3])
    expected = runner.verify([(slot, tree)], ()).logits
    for params in (SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0, top_p=0.5)):
        assert torch.equal(runner.verify([(slot, tree)], (), [params]).logits, expected)
    assert len(runner.verify([(slot, tree)], (), [SamplingParams(temperature=1.0)]).logits) == 0


def test_a_slot_forgets_who_had_it() -> None:
    runner = make_runner(num_slots=1)
    slot, ids = fill(runner, Random(10), 61)
    expected = read_plainly(runner, slot, [1, 2])
    for length in (100, 5):
        runner.cache.free(slot)
        fill(runner, Random(length), length)
    runner.cache.free(slot)
    assert runner.cache.reserve() == slot
    runner.prefill([(slot, ids)], ())
    assert torch.equal(read_plainly(runner, slot, [1, 2]), expected)


@pytest.mark.parametrize("context_length", [33, 100])
def test_the_largest_tree_fits_behind_the_longest_context(context_length: int) -> None:
    random, runner = Random(11), make_runner(context_length=context_length)
    slot, ids = fill(runner, random, context_length)
    tree = draw_tree(random, MAX_TREE_NODES)
    assert torch.equal(runner.verify([(slot, tree)], ()).logits, read_tree(runner, ids, tree))
    runner.keep([(slot, ())])
    room = runner.cache.capacity - context_length
    assert 0 <= room - MAX_TREE_NODES < 16
    with pytest.raises(BlockPilotError, match=f"KV slot {slot} holds"):
        runner.verify([(slot, draw_tree(random, room + 1))], ())
    assert torch.equal(runner.verify([(slot, tree)], ()).logits, read_tree(runner, ids, tree))


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"^the target cannot run in dtype int8: its intermediate size 48 is no"):
        CpuTargetRunner(make_decoder(), make_placement())


def test_passes_are_recorded_only_where_somebody_asks() -> None:
    runner = make_runner()
    slot, _ = fill(runner, Random(12), 8)
    tree = DraftTree.chain(1, [2])
    taps = runner.verify([(slot, tree)], (0, 1, 2)).taps
    assert taps is not None
    expected = taps.clone()
    with runner.recording() as outputs:
        runner.verify([(slot, tree)], ())
    assert len(outputs) == 1 and torch.equal(outputs[0].flatten(1), expected)
    assert runner.verify([(slot, tree)], ()).taps is None and len(outputs) == 1
