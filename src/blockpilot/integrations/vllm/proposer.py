"""What the plugin takes from vLLM's drafter, and what it repairs there."""

from typing import Any

import torch
from torch import Tensor

from blockpilot.integrations.vllm.settings import logger

TOLERANCE = {torch.float32: 1e-4}  # of the largest value
COARSE = 3e-2  # in dtypes of 16 bits


class DraftScores:
    """The drafter's confidence in each token that it drafts, taken where vLLM computes the logits anyway.

    vLLM's proposer turns the logits of a whole block into tokens in `_greedy_sample`, or with probabilities in
    `_sample_draft_tokens`. Both are wrapped on the one proposer; the drafted tokens stay the same.
    """

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.is_wanted = False
        self._log_probs: Tensor | None = None
        self._greedy_sample = proposer._greedy_sample
        self._sample_draft_tokens = proposer._sample_draft_tokens
        proposer._greedy_sample = self._sample_greedily
        proposer._sample_draft_tokens = self._sample

    def take(self) -> Tensor | None:
        """Log-probabilities of the tokens drafted since the last call, one per token; None: unknown."""
        taken, self._log_probs = self._log_probs, None
        return taken

    def _sample_greedily(self, hidden: Tensor) -> Tensor:
        if not self.is_wanted or self.proposer.use_local_argmax_reduction or self.proposer.use_heterogeneous_vocab:
            return self._greedy_sample(hidden)
        logits = self.proposer.model.compute_logits(hidden)
        token_ids = logits.argmax(dim=-1)
        self._log_probs = log_probs_of(logits, token_ids)
        return token_ids

    def _sample(self, hidden: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        token_ids, probabilities = self._sample_draft_tokens(hidden, sampling_metadata)
        if self.is_wanted and probabilities is not None:
            chosen = probabilities.gather(-1, token_ids.long()[:, None])[:, 0]
            self._log_probs = chosen.float().clamp_min(torch.finfo(torch.float32).tiny).log()
        return token_ids, probabilities


def log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities [N] of the tokens [N] under logits [N, V]."""
    chosen = logits.gather(-1, token_ids[:, None])[:, 0].float()
    return chosen - logits.float().logsumexp(dim=-1)


def repair_key_norm(draft_model: Any) -> bool:
    """Repair the model of a drafter if vLLM's kernel is at fault; says whether it was.

    DFlash normalises the context's keys of all its layers at once, with a weight per layer [L, head_dim]. The kernel of
    vLLM's CPU build reads the first row for all of them: drafts get worse without a word, the text stays right. Whether
    a kernel does that is tried on random keys; only then each layer is normalised by itself.
    """
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
