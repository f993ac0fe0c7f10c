"""The noise of sampling, a function of (seed, position, token id) and of nothing else.

Integer arithmetic makes it the same on every device. `gpu/kernels/ranking.py` computes it inside a pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def gumbel_noise(seed: int, positions: Sequence[int], *, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise [N, V], float32, from integer arithmetic that is the same on every device."""
    words = [_position_key(seed, position) for position in positions]
    halves = [[_signed(word) for word in words], [_signed(word >> 32) for word in words]]
    keys = torch.tensor(halves, dtype=torch.int32, device=device)  # [2, N]
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
