"""The drafter's confidence in each token that it drafts, taken where vLLM computes the logits anyway.

vLLM's proposer turns the logits of a whole block into tokens in `_greedy_sample`, or with probabilities in
`_sample_draft_tokens`. Both are wrapped on the one proposer; the drafted tokens stay the same.
"""

from typing import Any

import torch
from torch import Tensor


class DraftScores:
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
