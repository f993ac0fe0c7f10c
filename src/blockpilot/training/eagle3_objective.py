"""What an EAGLE-3 head learns: to continue the target's hidden states by itself ("training-time test").

Step 0 reads the target's fused taps, one pair per position. Step s reads its own outputs of step s - 1, shifted by one,
so that errors it will make when drafting are errors it trains on. Row i of step s is the s-th pair of the chain that
started at row i - s: it sees the text up to there and its own chain, nothing else.

The same unrolling evaluates a trained head: as long as all drafted tokens are right they equal the text's, so feeding
the text's tokens gives the accepted length of a chain from every anchor at once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.loss_terms import LossTerms

STEP_DECAY = 0.8  # loss weight of each further unrolled step


class UnrollAttention:
    """Attention of unrolled step s: the text up to the chain's start, and the chain itself."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        queries, keys, values = (x.view(self.batch_size, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        self.keys.append(keys.repeat_interleave(groups, dim=1))
        self.values.append(values.repeat_interleave(groups, dim=1))
        mask = unroll_mask(queries.shape[2], len(self.keys) - 1, q.device)
        out = F.scaled_dot_product_attention(
            queries, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=mask
        )
        return out.transpose(1, 2).reshape(q.shape[0], -1)


def unroll_mask(width: int, step: int, device: torch.device) -> Tensor:
    """[T, (step + 1) * T]: which rows of which step row i of this step sees."""
    row = torch.arange(width, device=device)[:, None]
    column = torch.arange(width, device=device)
    parts = [column <= row - step]
    parts += [column == row - step + later for later in range(1, step + 1)]
    return torch.cat(parts, dim=1)


def unroll(
    model: Eagle3, taps: Tensor, ids: Tensor, *, embed: Callable[[Tensor], Tensor], num_steps: int
) -> list[Tensor]:
    """Logits of every step, each [B, T - 1, draft vocab]: row i predicts token i + 2."""
    batch_size, width = ids.shape
    fused = model.fuse(taps).view(batch_size, width, -1)[:, :-1]
    embeddings = embed(ids[:, 1:].flatten()).to(model.norm.weight.dtype)
    positions = torch.arange(width - 1, device=ids.device).repeat(batch_size)
    attend, hidden, found = UnrollAttention(batch_size), fused, []
    for _ in range(num_steps):
        outputs = model(embeddings, hidden.flatten(0, 1), positions, attend)
        found.append(model.logits(outputs).view(batch_size, width - 1, -1))
        hidden = F.pad(outputs.view(batch_size, width - 1, -1)[:, :-1], (0, 0, 1, 0))
    return found


def eagle3_loss(
    model: Eagle3,
    taps: Tensor,
    ids: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    *,
    embed: Callable[[Tensor], Tensor],
    labels: Tensor,
    num_steps: int,
) -> LossTerms:
    """Cross-entropy, one term per unrolled step; `labels` [B, T] are head rows, -1 where the head has none."""
    rows = torch.arange(ids.shape[1] - 1, device=ids.device)
    target = F.pad(labels[:, 2:], (0, 1), value=-1)  # row i -> token i + 2
    decay_sum = sum(STEP_DECAY**step for step in range(num_steps))
    sums, weights, hits = [], [], []
    for step, logits in enumerate(unroll(model, taps, ids, embed=embed, num_steps=num_steps)):
        is_valid = (rows - step + 1 >= prompt_lengths[:, None]) & (rows + 2 < lengths[:, None])
        is_known = is_valid & (target >= 0)
        losses = F.cross_entropy(logits.float().flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        sums.append(STEP_DECAY**step / decay_sum * (losses.view(target.shape) * is_known).sum())
        weights.append(is_known.sum().float())
        hits.append(((logits.argmax(-1) == target) & is_known).roll(-step, dims=1))
    metrics = _chain_metrics(torch.stack(hits, -1), lengths, prompt_lengths)
    return LossTerms(torch.stack(sums), torch.stack(weights), metrics)


def _chain_metrics(hits: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> dict[str, Tensor]:
    """Means over the chains that fit into their answer; `hits` [B, T - 1, D] by starting row and depth."""
    rows = torch.arange(hits.shape[1], device=hits.device)
    starts = (rows + 1 >= prompt_lengths[:, None]) & (rows + hits.shape[2] + 1 < lengths[:, None])
    count = starts.sum().clamp(min=1)
    accepted = hits.float().cumprod(-1).sum(-1)
    return {"emitted": 1 + (accepted * starts).sum() / count, "first": (hits[..., 0] & starts).sum() / count}


def own_embedding(model: Eagle3, decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """The head's own embedding where its checkpoint has one, else the target's."""
    return decoder.embed_tokens if model.embed_tokens is None else model.embed_tokens
