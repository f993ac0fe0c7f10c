"""What a request asks of scores beyond temperature and limits: penalties, biases, log-probabilities.

Penalties depend on what was written before, so every node of a tree has scores of its own. They are made on the host,
for the nodes that acceptance walks through and no others. The token after a node is then a function of its logits, the
tokens before it and the noise of its position: the same under every pilot, and under plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from blockpilot.core.records import TokenScore
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.guiding import GuideState
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.decoding.verification import Acceptance


@dataclass(kw_only=True)
class Adjustment:
    """Of one request, from its prompt on."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # the answer as it grows
    guide: GuideState | None = None
    _counts: Tensor | None = field(default=None, init=False)  # [V] how often the answer has each token
    _is_known: Tensor | None = field(default=None, init=False)  # [V] whether prompt or answer have it
    _num_counted: int = field(default=0, init=False)

    def adjust(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Scores [V] of the token behind a path of drafted tokens, from its logits."""
        params, scores = self.params, logits.float().clone()
        if params.is_penalised:
            counts, is_known = self._count(scores, path)
            if params.repetition_penalty != 1:
                factor = torch.where(scores > 0, 1 / params.repetition_penalty, params.repetition_penalty)
                scores = torch.where(is_known, scores * factor, scores)
            scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        for token_id, bias in params.logit_bias:
            scores[token_id] += bias
        if self.guide is not None:
            self.guide.follow(self.output_ids)
            scores.masked_fill_(~self.guide.allowed(path).to(scores.device), float("-inf"))
        return scores

    def prune(self, tree: DraftTree, *, max_depth: int) -> DraftTree:
        """What is worth a check."""
        if self.guide is None:
            return tree
        self.guide.follow(self.output_ids)
        return self.guide.prune(tree, max_depth=max_depth)

    def _count(self, scores: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self._counts is None or self._is_known is None:
            self._counts = torch.zeros_like(scores)
            self._is_known = torch.zeros_like(scores, dtype=torch.bool)
            self._is_known[torch.tensor(self.prompt_ids, device=scores.device)] = True
        for token_id in islice(self.output_ids, self._num_counted, None):
            self._counts[token_id] += 1
            self._is_known[token_id] = True
        self._num_counted = len(self.output_ids)
        if not path:
            return self._counts, self._is_known
        counts, is_known = self._counts.clone(), self._is_known.clone()
        for token_id in path:
            counts[token_id] += 1
            is_known[token_id] = True
        return counts, is_known


def choose_token(adjustment: Adjustment, logits: Tensor, path: Sequence[int], position: int) -> int:
    """The token at `position`, behind a path of drafted tokens whose last one has these logits [V]."""
    scores = adjustment.adjust(logits, path)
    return int(choose_tokens(scores[None], adjustment.params, [position]))


def accept_adjusted(adjustment: Adjustment, tree: DraftTree, logits: Tensor, position: int) -> Acceptance:
    """The walk of `accept`, where every node has scores of its own; `logits` [nodes, V], the anchor at `position`."""
    node, path, emitted = 0, [0], [choose_token(adjustment, logits[0], (), position + 1)]
    for index, parent in enumerate(tree.parents):
        if parent == node and tree.token_ids[index] == emitted[-1]:
            node = index
            path.append(index)
            emitted.append(choose_token(adjustment, logits[index], emitted, position + len(emitted) + 1))
    return Acceptance(tuple(path), tuple(emitted))


def score_tokens(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenScore]:
    """How likely the target found each token, and its best ones beside it; row i of `logits` decided token i.

    Of its own distribution: before temperature, penalties and limits.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = log_probs.topk(num_top, dim=-1)
    rows = zip(token_ids, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScore(one, score, tuple(zip(ids, scores, strict=True))) for one, score, ids, scores in rows]
