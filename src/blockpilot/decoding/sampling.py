"""Which token the target emits: a function of its logits and of noise tied to (seed, position, token id).

Sampling is the Gumbel-max trick with a counter-based generator: the emitted token is the argmax of filtered
logits / temperature + noise. The noise does not depend on what was computed before, in which batch or in which block,
so the same seed gives the same text under every pilot and under plain decoding. A drafter may use the same noise.

A row's token is a function of that row alone: top-p adds up whole numbers, whose sum has no order. A row whose best
score is no finite number has no token: `NO_TOKEN`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.models.noise import gumbel_noise

_PARTIAL_SORT = 1024  # top-p looks at this many best tokens first; the whole vocabulary only where they do not suffice
NO_TOKEN = -1
_UNIT = 2.0**40  # weight of the best token; a vocabulary of 2**22 of them still fits into 63 bits


def choose_tokens(logits: Tensor, params: SamplingParams, positions: Sequence[int]) -> Tensor:
    """The emitted token of each row [N]; row i decides the token at sequence position `positions[i]`."""
    if params.is_greedy:
        return best_tokens(logits)
    scores = filter_logits(logits.float() / params.temperature, params.top_k, params.top_p, params.min_p)
    noise = gumbel_noise(params.seed, positions, vocab_size=logits.shape[-1], device=logits.device)
    return best_tokens(scores + noise)


def best_tokens(scores: Tensor) -> Tensor:
    """The token of the highest score in each row, the first of equals."""
    values, ids = scores.max(dim=-1)
    return torch.where(values.isfinite(), ids, NO_TOKEN)


def filter_logits(scores: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Scores [N, V] with every token below min-p, outside top-k, then outside the top-p nucleus, at minus infinity."""
    vocab_size = scores.shape[-1]
    if min_p > 0:
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), float("-inf"))
    if 0 < top_k < vocab_size:
        edge = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < edge, float("-inf"))
    if top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_edge(scores, top_p), float("-inf"))
    return scores


def _nucleus_edge(scores: Tensor, top_p: float) -> Tensor:
    """Score [N, 1] of the last token that the nucleus needs to hold at least `top_p` of the probability."""
    weights = _weigh(scores)  # [N, V]
    needed = (weights.sum(dim=-1, keepdim=True).double() * top_p).ceil().long()  # [N, 1]
    best, ids = scores.topk(min(_PARTIAL_SORT, scores.shape[-1]), dim=-1)
    held = weights.gather(1, ids).cumsum(dim=-1)
    if bool((held[:, -1:] < needed).any()):  # the rows that had enough find the same edge again
        best, ids = scores.sort(dim=-1, descending=True)
        held = weights.gather(1, ids).cumsum(dim=-1)
    last = (held < needed).sum(dim=-1, keepdim=True).clamp(max=held.shape[-1] - 1)
    return best.gather(1, last)


def _weigh(scores: Tensor) -> Tensor:
    """Probabilities [N, V] in proportion, as whole numbers."""
    shares = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    return shares.mul_(_UNIT).round_().to(torch.int64)
