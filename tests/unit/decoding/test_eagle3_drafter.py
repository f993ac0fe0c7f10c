"""EAGLE-3 drafting: cached passes equal recomputation from scratch, in any company, as chain and as tree."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.cache.attention import RaggedAttention, Segment
from blockpilot.cache.slots import SlotCache
from blockpilot.core.draft import HostDraft
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.models.decoder import Decoder
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.noise import gumbel_noise
from blockpilot.pilots.growth import GrowthRules, falling_costs, grow_chain, grow_tree
from tests.support import causal_attend, children_of, paths_of
from tests.tiny import make_cache, make_decoder, make_eagle3, make_placement

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=3)
TEXTS = [[5, 9, 3, 22, 41, 7, 13, 30, 2], [60, 1, 17, 17, 8], [4, 11]]


def make_drafter(model: Eagle3, decoder: Decoder, **options: int) -> Eagle3Drafter:
    return Eagle3Drafter(model, make_placement(4, 64), embed=decoder.embed_tokens, **options)


def taps_of(decoder: Decoder, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        taps = decoder(torch.tensor(ids), torch.arange(len(ids)), causal_attend, (0, 1, 2))[1]
    assert taps is not None
    return taps


def observe(drafter: Eagle3Drafter, decoder: Decoder, text: list[int], *, slot: int, chunks: Sequence[int]) -> None:
    """All but the last token, which is the anchor, in pieces that end at `chunks`."""
    taps, start = taps_of(decoder, text), 0
    for end in [*chunks, len(text) - 1]:
        drafter.observe([Observation(slot, text[start:end], taps[start:end])])
        start = end


def request(
    text: list[int], *, slot: int, block_size: int, width: int, params: SamplingParams = GREEDY
) -> DraftRequest:
    return DraftRequest(
        slot=slot,
        anchor_id=text[-1],
        position=len(text) - 1,
        block_size=block_size,
        num_candidates=width,
        params=params,
    )


@torch.inference_mode()
def scores_after(model: Eagle3, decoder: Decoder, text: list[int], path: list[int], params: SamplingParams) -> Tensor:
    """Log-probabilities of the token after text + path, every pair run again from scratch, no cache."""
    embeddings = decoder.embed_tokens(torch.tensor([*text[1:], *path]))
    hidden = model.fuse(taps_of(decoder, text[:-1]))
    for _ in range(len(path) + 1):
        count = len(hidden)
        output = model(embeddings[:count], hidden, torch.arange(count), causal_attend)
        hidden = torch.cat([hidden, output[-1:]])  # the next pair continues the last output
    scores = model.logits(output[-1:])[0]
    if not params.is_greedy:
        position = len(text) + len(path)
        noise = gumbel_noise(params.seed, [position], vocab_size=model.config.layers.vocab_size)[0]
        scores = scores / params.temperature + noise[model.draft_token_ids]
    return scores.log_softmax(-1)


def path_scores(draft: HostDraft) -> list[float]:
    """Log-probability of the path to each node of a drafter's own tree, behind the anchor."""
    assert draft.tree is not None and draft.node_log_probs is not None
    scores = [0.0]
    for parent, log_prob in zip(draft.tree.parents[1:], draft.node_log_probs, strict=True):
        scores.append(scores[parent] + float(log_prob))
    return scores[1:]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("chunks", [(), (1,), (3, 4)])
def test_a_chain_equals_recomputation(params: SamplingParams, chunks: tuple[int, ...]) -> None:
    model, decoder, text = make_eagle3(), make_decoder(), TEXTS[0]
    drafter = make_drafter(model, decoder)
    observe(drafter, decoder, text, slot=1, chunks=chunks)
    (found,) = drafter.propose([request(text, slot=1, block_size=6, width=1, params=params)])
    assert found.tree is None and found.token_ids.shape == found.log_probs.shape == (5, 1)
    path: list[int] = []
    for depth in range(5):
        expected = scores_after(model, decoder, text, path, params)
        path.append(int(model.draft_token_ids[expected.argmax()]))
        assert found.token_ids[depth, 0] == path[-1]
        assert found.log_probs[depth, 0] == pytest.approx(float(expected.max()), abs=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_tree_equals_recomputation(params: SamplingParams) -> None:
    model, decoder, text = make_eagle3(), make_decoder(), TEXTS[0]
    drafter = make_drafter(model, decoder, tree_width=3, tree_children=4)
    observe(drafter, decoder, text, slot=0, chunks=(2,))
    (found,) = drafter.propose([request(text, slot=0, block_size=5, width=6, params=params)])
    assert found.tree is not None and found.token_ids.shape == (4, 6)
    row_of = {int(token_id): row for row, token_id in enumerate(model.draft_token_ids)}
    assert found.tree.token_ids[0] == text[-1] and found.node_log_probs is not None
    for path, log_prob in zip(paths_of(found.tree), found.node_log_probs, strict=True):
        expected = scores_after(model, decoder, text, list(path[:-1]), params)
        assert log_prob == pytest.approx(float(expected[row_of[path[-1]]]), abs=1e-4)
    chain = list(grow_chain(found, text[-1], 99).token_ids[1:])
    assert chain == found.token_ids[:, 0].tolist()
    for depth in range(4):
        expected = scores_after(model, decoder, text, chain[:depth], params).topk(6)
        assert found.token_ids[depth].tolist() == model.draft_token_ids[expected.indices].tolist()
        np.testing.assert_allclose(found.log_probs[depth], expected.values, atol=1e-4)


def test_the_shape_of_a_tree() -> None:
    model, decoder, text = make_eagle3(), make_decoder(), TEXTS[0]
    drafter = make_drafter(model, decoder, tree_width=3, tree_children=4)
    observe(drafter, decoder, text, slot=0, chunks=())
    (found,) = drafter.propose([request(text, slot=0, block_size=5, width=6)])
    tree = found.tree
    assert tree is not None and len(tree) == 1 + 4 + 3 * 3 * 4
    assert tree.depths == (0, *map(len, paths_of(tree))) and tree.max_depth == 4
    scores = [0.0, *path_scores(found)]
    for depth in (1, 2, 3):
        level = [node for node in range(len(tree)) if tree.depths[node] == depth]
        expanded = {node for node in level if children_of(tree)[node]}
        assert len(expanded) == 3
        best = sorted(level, key=lambda node: -scores[node])
        assert len(expanded - set(best[:3])) <= 1 and best[0] in expanded  # one place may go to the likeliest chain
    (small,) = drafter.propose([request(text, slot=0, block_size=3, width=2)])
    assert small.tree is not None and len(small.tree) == 1 + 2 + 2 * 2


def test_drafting_leaves_the_context_as_it_was() -> None:
    model, decoder, text = make_eagle3(), make_decoder(), TEXTS[0]
    drafter = make_drafter(model, decoder)
    observe(drafter, decoder, text[:6], slot=2, chunks=())
    drafter.propose([request(text[:6], slot=2, block_size=16, width=9)])
    assert drafter.cache.lengths[2] == 4 and drafter.cache.appended[2] == 0
    taps = taps_of(decoder, text)
    drafter.observe([Observation(2, text[5:8], taps[5:8])])
    (found,) = drafter.propose([request(text, slot=2, block_size=6, width=1)])
    fresh = make_drafter(model, decoder)
    observe(fresh, decoder, text, slot=0, chunks=())
    (expected,) = fresh.propose([request(text, slot=0, block_size=6, width=1)])
    assert_same(found, expected)
    drafter.forget(2)
    observe(drafter, decoder, TEXTS[1], slot=2, chunks=())
    fresh.forget(0)
    observe(fresh, decoder, TEXTS[1], slot=0, chunks=())
    assert_same(
        *(d.propose([request(TEXTS[1], slot=s, block_size=6, width=4)])[0] for d, s in ((drafter, 2), (fresh, 0)))
    )


def assert_same(found: HostDraft, expected: HostDraft) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    assert found.tree == expected.tree
    if found.tree is not None:
        assert found.node_log_probs is not None and expected.node_log_probs is not None
        np.testing.assert_allclose(found.node_log_probs, expected.node_log_probs, atol=1e-4)


def test_a_batch_equals_one_by_one() -> None:
    """Chains and trees of different sizes, sampled and greedy, observed and drafted together."""
    model, decoder = make_eagle3(has_embedding=True), make_decoder()
    together, alone = make_drafter(model, decoder), make_drafter(model, decoder)
    together.observe([Observation(slot, text[:-1], taps_of(decoder, text)[:-1]) for slot, text in enumerate(TEXTS)])
    shapes = [(7, 8, GREEDY), (3, 1, SAMPLED), (5, 3, SAMPLED)]
    requests = [
        request(text, slot=slot, block_size=size, width=width, params=params)
        for slot, (text, (size, width, params)) in enumerate(zip(TEXTS, shapes, strict=True))
    ]
    found = together.propose(requests)
    for slot, text in enumerate(TEXTS):
        observe(alone, decoder, text, slot=slot, chunks=())
        assert_same(found[slot], alone.propose([requests[slot]])[0])


def test_pilots_take_chains_and_trees_out_of_it() -> None:
    model, decoder, text = make_eagle3(), make_decoder(), TEXTS[0]
    drafter = make_drafter(model, decoder)
    observe(drafter, decoder, text, slot=0, chunks=())
    (found,) = drafter.propose([request(text, slot=0, block_size=8, width=16)])
    assert found.tree is not None
    scores = dict(zip(paths_of(found.tree), path_scores(found), strict=True))
    for num_nodes in (1, 7, 40, 1000):
        tree = grow_tree(found, text[-1], GrowthRules(falling_costs(num_nodes), depth=7)).tree
        taken = paths_of(tree)
        assert len(set(taken)) == len(taken) == min(num_nodes, len(found.tree) - 1)
        best = sorted(scores.values(), reverse=True)[: len(taken)]
        np.testing.assert_allclose([scores[path] for path in taken], best, atol=1e-5)  # best first, too
    short = grow_tree(found, text[-1], GrowthRules(falling_costs(1000), depth=2)).tree
    assert set(paths_of(short)) == {path for path in scores if len(path) <= 2}
    assert len(grow_chain(found, text[-1], 3)) == 4 and len(grow_chain(found, text[-1], 99)) == 8


def test_a_mask_may_reach_back_over_kept_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(5, 4, 8, generator=generator), *torch.randn(2, 5, 2, 8, generator=generator)
    full = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=np.bool_
    )

    def cache() -> SlotCache:
        return make_cache(num_layers=1, num_slots=1, num_kv_heads=2, head_dim=8, capacity=8)

    expected = RaggedAttention(cache(), [Segment(0, 5, full)])(0, q, k, v)
    stepwise, outputs = cache(), []
    for start, end in ((0, 1), (1, 3), (3, 5)):
        attend = RaggedAttention(stepwise, [Segment(0, end - start, full[start:end, :end])])
        outputs.append(attend(0, q[start:end], k[start:end], v[start:end]))
        stepwise.keep(0, range(end - start))
    assert torch.allclose(torch.cat(outputs), expected, atol=1e-6)
    stepwise.rewind(0, 1)
    assert stepwise.lengths[0] == 1
