"""Rotary settings of a GGUF file.

Llama 3 scales its rotary frequencies by a formula with four numbers. llama.cpp evaluates it once and stores the result,
one divisor per frequency. We need the numbers back, to write them into a config.json: the largest divisor is the
factor, the other three are the same in every Llama 3 release. If the formula then gives the stored divisors, it is
right; otherwise the file uses a scaling we do not know, and is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import RopeConfig
from blockpilot.models.layers import rope_frequencies


def rope_from_gguf(settings: Mapping[str, Any], *, head_dim: int, factors: Tensor | None, where: str) -> RopeConfig:
    """`settings` are the fields below the architecture's name, `factors` the tensor rope_freqs.weight."""
    theta = float(settings.get("rope.freq_base", 10000.0))
    kind = settings.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise InputError(f"{where}: rope scaling {kind!r} is not supported; known: none, linear, llama3")
    if factors is not None:
        if kind == "linear":
            raise InputError(f"{where}: linear rope scaling together with rope_freqs.weight is not supported")
        return _recover_llama3(theta, head_dim=head_dim, factors=factors, where=where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(settings.get("rope.scaling.factor", 1.0)))
    return RopeConfig(theta=theta)


def _recover_llama3(theta: float, *, head_dim: int, factors: Tensor, where: str) -> RopeConfig:
    plain = RopeConfig(theta=theta)
    if factors.numel() != head_dim // 2:
        raise InputError(f"{where}: rope_freqs.weight has {factors.numel()} values, expected {head_dim // 2}")
    if bool((factors == 1).all()):
        return plain
    scaled = RopeConfig(theta=theta, kind="llama3", factor=round(float(factors.max()), 4))
    expected = rope_frequencies(plain, head_dim) / rope_frequencies(scaled, head_dim)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise InputError(f"{where}: rope_freqs.weight follows no known scaling; use the Hugging Face folder instead")
    return scaled
