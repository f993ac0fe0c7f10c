"""A fault of vLLM's CPU build, found and repaired.

DFlash normalises the context's keys of all its layers at once, with a weight per layer [L, head_dim]. The CPU kernel
reads the first row for all of them: drafts get worse without a word, the text stays right. Whether a kernel does that
is tried on random keys; only then each layer is normalised by itself.
"""

from typing import Any

import torch
from torch import Tensor

from blockpilot.integrations.vllm.settings import logger

TOLERANCE = {torch.float32: 1e-4}  # of the largest value
COARSE = 3e-2  # in dtypes of 16 bits


def repair_key_norm(draft_model: Any) -> bool:
    """Repair the model of a drafter if its kernel is at fault; says whether it was."""
    model = getattr(draft_model, "model", draft_model)
    weights, epsilon = getattr(model, "_k_norm_weights", None), getattr(model, "_rms_norm_eps", None)
    if weights is None or epsilon is None or weights.dim() != 2:
        return False
    random = torch.Generator(device="cpu").manual_seed(0)
    keys = torch.randn(len(weights), 2, 1, weights.shape[1], generator=random).to(weights)
    wanted = normalize_keys(keys, weights, epsilon)
    error = (model._normalize_context_k(keys) - wanted).abs().max()
    if error <= TOLERANCE.get(weights.dtype, COARSE) * wanted.abs().max():
        return False
    model._normalize_context_k = lambda keys: normalize_keys(keys, model._k_norm_weights, epsilon)
    logger.warning("vLLM's kernel gives all draft layers the key norm of the first one: repaired in this process.")
    return True


def normalize_keys(keys: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """RMS norm of keys [L, N, heads, head_dim] with a weight per layer [L, head_dim]."""
    values = keys.float()
    scale = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (values * scale).to(keys.dtype) * weights[:, None, None, :]
