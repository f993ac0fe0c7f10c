"""Which token the target emits: a function of its logits and of noise tied to (seed, position, token id).

Sampling is the Gumbel-max trick with a counter-based generator: the emitted token is the argmax of filtered
logits / temperature + noise. The noise does not depend on what was computed before, in which batch or in which block,
so the same seed gives the same text under every pilot and under plain decoding. A drafter may use the same noise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.models.gpu import fused_kernels, has_triton

_MASK64 = (1 << 64) - 1
_PARTIAL_SORT = 1024  # top-p looks at this many best tokens first; the whole vocabulary only where they do not suffice


def choose_tokens(logits: Tensor, params: SamplingParams, positions: Sequence[int]) -> Tensor:
    """The emitted token of each row [N]; row i decides the token at sequence position `positions[i]`."""
    if params.is_greedy:
        return logits.argmax(dim=-1)
    scores = filter_logits(logits.float() / params.temperature, params.top_k, params.top_p)
    noise = gumbel_noise(params.seed, positions, vocab_size=logits.shape[-1], device=logits.device)
    return (scores + noise).argmax(dim=-1)


def filter_logits(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Scores [N, V] with every token outside top-k, then outside the top-p nucleus, at minus infinity."""
    vocab_size = scores.shape[-1]
    if 0 < top_k < vocab_size:
        edge = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < edge, float("-inf"))
    if top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_edge(scores, top_p), float("-inf"))
    return scores


def _nucleus_edge(scores: Tensor, top_p: float) -> Tensor:
    """Score [N, 1] of the last token that the nucleus needs to hold at least `top_p` of the probability."""
    log_mass = scores.logsumexp(dim=-1, keepdim=True)
    best = scores.topk(min(_PARTIAL_SORT, scores.shape[-1]), dim=-1).values
    if bool(((best - log_mass).exp().sum(dim=-1) < top_p).any()):
        best = scores.sort(dim=-1, descending=True).values
    before = (best - log_mass).exp().cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return best.gather(1, last)


def gumbel_noise(seed: int, positions: Sequence[int], *, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise [N, V], float32, from integer arithmetic that is the same on every device."""
    words = [_position_key(seed, position) for position in positions]
    halves = [[_signed(word) for word in words], [_signed(word >> 32) for word in words]]
    keys = torch.tensor(halves, dtype=torch.int32, device=device)  # [2, N]
    if keys.is_cuda and has_triton():
        noise: Tensor = fused_kernels(keys.device).gumbel(keys, vocab_size)
        return noise
    first, second = keys[0, :, None], keys[1, :, None]
    bits = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0x9E3779B1) + first  # [N, V]
    bits = _mix(_mix(bits) + second)
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """A bijective 32-bit finaliser: every input bit reaches every output bit."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _signed(0x7FEB352D)
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0x846CA68B)
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _position_key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position)."""
    key = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
    return key ^ (key >> 31)


def _signed(value: int) -> int:
    """The low 32 bits of `value` as a signed 32-bit integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
