"""Which token the target emits: noise tied to (seed, position, token id), filters, argmax."""

from unittest import mock

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding import sampling
from blockpilot.decoding.sampling import choose_tokens, filter_logits
from blockpilot.models.noise import gumbel_noise

VOCAB_SIZE = 300
REFERENCE_NOISE = [
    [-0.661541, 0.497638, 0.595112, -0.594138],
    [-0.715215, -0.145772, -0.652570, -0.179837],
]  # seed 42, positions 0 and 5, tokens 0 to 3


def noise(seed: int, positions: list[int], vocab_size: int = VOCAB_SIZE) -> Tensor:
    return gumbel_noise(seed, positions, vocab_size=vocab_size)


def naive_filter(row: list[float], top_k: int, top_p: float) -> list[bool]:
    """Which tokens of one row stay: a sort and a loop in double precision."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    kept = order[:top_k] if top_k else order
    weights = np.exp(np.array([row[token] for token in kept], dtype=np.float64) - row[kept[0]])
    weights /= weights.sum()
    mass, nucleus = 0.0, set()
    for token, weight in zip(kept, weights, strict=True):
        if mass >= top_p:
            break
        nucleus.add(token)
        mass += weight
    return [token in nucleus for token in range(len(row))]


def test_noise_does_not_depend_on_the_batch_or_on_the_vocabulary() -> None:
    whole = noise(7, [3, 11, 500])
    for row, position in enumerate([3, 11, 500]):
        assert torch.equal(noise(7, [position])[0], whole[row])
    assert torch.equal(noise(7, [500, 3])[0], whole[2])
    assert torch.equal(noise(7, [3, 11, 500], vocab_size=40), whole[:, :40])


def test_noise_differs_between_seeds_positions_and_tokens() -> None:
    samples = torch.cat([noise(seed, [0, 1, 2**20]) for seed in (0, 1, 2**32, 2**63 - 1)])
    assert torch.isfinite(samples).all()
    assert samples.flatten().unique().numel() > 0.999 * samples.numel()
    assert len({tuple(row[:5].tolist()) for row in samples}) == len(samples)


def test_noise_is_the_same_today_as_tomorrow() -> None:
    """A seed is a promise: these values must not change between versions."""
    expected = torch.tensor(REFERENCE_NOISE)
    torch.testing.assert_close(noise(42, [0, 5], vocab_size=4), expected, rtol=1e-5, atol=1e-5)


def test_noise_follows_the_gumbel_distribution() -> None:
    along_tokens = noise(1, [17], vocab_size=20_000)[0]
    along_positions = noise(2, list(range(5000)), vocab_size=3)[:, 1]
    along_seeds = torch.stack([noise(seed, [9], vocab_size=2)[0, 0] for seed in range(5000)])
    for samples in (along_tokens, along_positions, along_seeds):
        assert scipy.stats.kstest(samples.double().numpy(), "gumbel_r").pvalue > 1e-3


def test_neighbouring_noise_is_uncorrelated() -> None:
    table = noise(3, list(range(400)), vocab_size=50).double().numpy()
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_greedy_is_the_argmax_and_ignores_the_seed() -> None:
    logits = torch.randn(6, VOCAB_SIZE)
    for seed in (0, 9):
        assert torch.equal(choose_tokens(logits, SamplingParams(seed=seed), range(6)), logits.argmax(-1))


def test_sampled_tokens_are_the_argmax_of_filtered_logits_plus_noise() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, VOCAB_SIZE)
    params = SamplingParams(temperature=0.8, top_k=20, seed=4)
    positions = [9, 2, 30, 31, 32]
    expected = (filter_logits(logits / 0.8, 20, 1.0) + noise(4, positions)).argmax(-1)
    assert torch.equal(choose_tokens(logits, params, positions), expected)


def test_a_row_is_chosen_alike_alone_and_in_a_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, VOCAB_SIZE) * 2
    params = SamplingParams(temperature=1.0, top_p=0.8, top_k=40, seed=3)
    together = choose_tokens(logits, params, range(8))
    alone = [choose_tokens(logits[row : row + 1], params, [row]) for row in range(8)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("top_k", [0, 1, 7, 299, 300, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_filters_keep_what_a_plain_sort_keeps(top_k: int, top_p: float) -> None:
    torch.manual_seed(2)
    scores = torch.randn(4, VOCAB_SIZE) * torch.tensor([[0.1], [1.0], [3.0], [10.0]])
    filtered = filter_logits(scores, top_k, top_p)
    assert torch.isfinite(filtered).tolist() == [naive_filter(row, top_k, top_p) for row in scores.tolist()]
    kept = torch.isfinite(filtered)
    assert torch.equal(filtered[kept], scores[kept])


@pytest.mark.parametrize("top_k", [0, 60])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_a_nucleus_beyond_the_partial_sort_is_found_all_the_same(
    top_p: float, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_PARTIAL_SORT", 8)
    torch.manual_seed(3)
    scores = torch.randn(3, VOCAB_SIZE) * torch.tensor([[0.05], [1.0], [6.0]])  # flat, middling, peaked
    filtered = filter_logits(scores, top_k, top_p)
    assert torch.isfinite(filtered).tolist() == [naive_filter(row, top_k, top_p) for row in scores.tolist()]


@st.composite
def score_rows(draw: st.DrawFn) -> Tensor:
    """Rows that are flat, peaked, full of ties or partly minus infinity, of a small or a large vocabulary."""
    vocab_size = draw(st.sampled_from([3, 40, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.sampled_from([0.0, 0.01, 1.0, 8.0, 60.0]), min_size=1, max_size=6))
    rows = torch.stack([torch.randn(vocab_size, generator=generator) * scale for scale in kinds])
    if draw(st.booleans()):
        rows = rows.round()
    if draw(st.booleans()):
        rows[:, 1::2] = float("-inf")
    return rows


filters = {"top_k": st.sampled_from([0, 1, 2, 30, 1200]), "top_p": st.floats(1e-6, 1)}


@given(scores=score_rows(), **filters)
def test_a_row_is_filtered_alike_alone_and_in_any_batch(scores: Tensor, top_k: int, top_p: float) -> None:
    together = filter_logits(scores, top_k, top_p)
    alone = torch.cat([filter_logits(row[None], top_k, top_p) for row in scores])
    assert torch.equal(together, alone)
    assert torch.equal(filter_logits(scores.flip(0), top_k, top_p).flip(0), together)
    with mock.patch.object(sampling, "_PARTIAL_SORT", 4):
        assert torch.equal(filter_logits(scores, top_k, top_p), together)


@given(scores=score_rows(), seed=st.integers(0, 2**63 - 1), **filters)
def test_a_row_is_chosen_alike_in_any_batch(scores: Tensor, seed: int, top_k: int, top_p: float) -> None:
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        positions = [11 * row for row in range(len(scores))]
        together = choose_tokens(scores, params, positions)
        alone = [choose_tokens(row[None], params, [place]) for row, place in zip(scores, positions, strict=True)]
        assert torch.equal(together, torch.cat(alone))


@given(scores=score_rows(), top_p=st.floats(1e-6, 1, exclude_max=True))
def test_the_nucleus_is_that_of_double_precision_away_from_its_edge(scores: Tensor, top_p: float) -> None:
    kept = torch.isfinite(filter_logits(scores, 0, top_p))
    for row, is_kept in zip(scores.double(), kept, strict=True):
        shares = row.softmax(-1)
        better = torch.tensor([float(shares[row > score].sum()) for score in row])  # mass of strictly better tokens
        assert is_kept[(better < top_p - 1e-5) & torch.isfinite(row)].all()
        assert not is_kept[better > top_p + 1e-5].any()
