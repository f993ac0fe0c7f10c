"""What an EAGLE-3 head learns: to continue the target's hidden states by itself ("training-time test").

Step 0 reads the target's fused taps, one pair per position. Step s reads its own outputs of step s - 1, shifted by one,
so that errors it will make when drafting are errors it trains on. Row i of step s is the s-th pair of the chain that
started at row i - s: it sees the text up to there and its own chain, nothing else.

The same unrolling evaluates a trained head: as long as all drafted tokens are right they equal the text's, so feeding
the text's tokens gives the accepted length of a chain from every anchor at once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import Decoder
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.training.dflash_objective import read_taps
from blockpilot.training.evaluation import RECALL_AT, TauReport, tau_report
from blockpilot.training.responses import ResponseSet

STEP_DECAY = 0.8  # loss weight of each further unrolled step


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    draft_vocab_size: int = 4096
    intermediate_size: int | None = None
    num_unrolled: int = 7  # steps of training-time test


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of all unrolled steps; `labels` [B, T] are head rows, -1 where the head has none."""
    rows = torch.arange(ids.shape[1] - 1, device=ids.device)
    target = F.pad(labels[:, 2:], (0, 1), value=-1)  # row i -> token i + 2
    total, weight_sum, hits = torch.zeros((), device=ids.device), 0.0, []
    for step, logits in enumerate(unroll(model, taps, ids, embed=embed, num_steps=num_steps)):
        is_valid = (rows - step + 1 >= prompt_lengths[:, None]) & (rows + 2 < lengths[:, None])
        is_known = is_valid & (target >= 0)
        losses = F.cross_entropy(logits.float().flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        total = total + STEP_DECAY**step * (losses.view(target.shape) * is_known).sum() / is_known.sum().clamp(min=1)
        weight_sum += STEP_DECAY**step
        hits.append(((logits.argmax(-1) == target) & is_known).roll(-step, dims=1))
    accepted = torch.stack(hits, -1).float().cumprod(-1).sum(-1)
    starts = (rows + 1 >= prompt_lengths[:, None]) & (rows + num_steps + 1 < lengths[:, None])
    emitted = 1 + (accepted * starts).sum() / starts.sum().clamp(min=1)
    return total / weight_sum, {
        "loss": (total / weight_sum).detach(),
        "emitted": emitted,
        "first": hits[0].float().mean(),
    }


def build_eagle3(shape: Eagle3Shape, target: DecoderConfig, draft_token_ids: Tensor) -> Eagle3:
    count = target.num_layers
    layers = replace(
        target,
        architecture="llama",
        moe=None,
        num_layers=1,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
    )
    config = Eagle3Config(
        layers=layers,
        draft_vocab_size=len(draft_token_ids),
        tap_layers=(1, count // 2 - 1, count - 4) if count >= 6 else (0, count // 2, count - 1),
        num_target_layers=count,
        target_hidden_size=target.hidden_size,
    )
    model = Eagle3(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    model.draft_token_ids = draft_token_ids
    return model


class Eagle3Training:
    """The objective that the trainer runs."""

    def __init__(
        self,
        model: Eagle3,
        decoder: Decoder,
        *,
        num_unrolled: int,
        is_compiled: bool,
        held_out: ResponseSet | None,
        width: int,
    ) -> None:
        self.model, self.decoder, self.num_unrolled = model, decoder, num_unrolled
        self.held_out, self.width = held_out, width
        self.device = decoder.embed_tokens.weight.device
        model.draft_token_ids = model.draft_token_ids.to(self.device)
        model.lm_head.weight.data.copy_(
            decoder.lm_head.weight[model.draft_token_ids].float()
        )  # start from the target's rows
        self.row_of = model.draft_rows()
        self._loss = torch.compile(eagle3_loss) if is_compiled else eagle3_loss
        self._read_taps = torch.compile(read_taps) if is_compiled else read_taps

    def loss(
        self, ids: Tensor, lengths: Tensor, prompt_lengths: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _, taps = self._read_taps(self.decoder, ids, self.model.config.tap_layers)
        with self._autocast():
            return self._loss(
                self.model, taps, ids, lengths, prompt_lengths,
                embed=self.decoder.embed_tokens, labels=self.row_of[ids], num_steps=self.num_unrolled,
            )  # fmt: skip

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        with self._autocast():
            return asdict(
                evaluate_eagle3(
                    self.model, self.decoder, self.held_out, block_size=self.num_unrolled + 1, width=self.width
                )
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


@torch.inference_mode()
def evaluate_eagle3(
    model: Eagle3, decoder: Decoder, responses: ResponseSet, *, block_size: int, width: int, batch_size: int = 16
) -> TauReport:
    """Tau of chains of `block_size` from every anchor of finished greedy answers."""
    device = decoder.embed_tokens.weight.device
    emitted: list[Tensor] = []
    scores: list[Tensor] = []
    row_of = model.draft_rows().to(device)
    for first in range(0, len(responses), batch_size):
        indices = torch.arange(first, min(first + batch_size, len(responses)))
        ids, lengths, prompt_lengths = (x.to(device) for x in responses.batch(indices, width))
        _, taps = read_taps(decoder, ids, model.config.tap_layers)
        hits, recalls = _chain_hits(model, decoder, taps, ids, lengths, row_of, num_steps=block_size - 1)
        for row in range(len(indices)):
            start, end = int(prompt_lengths[row]) - 1, int(lengths[row]) - 1
            emitted.append(1 + hits[row, start:end].float().cumprod(-1).sum(-1).long().cpu())
            whole = slice(start, max(start, end - block_size))
            scores.append(torch.stack((hits[row, whole], recalls[row, whole]), -1).float())
    return tau_report(emitted, responses, width=width, per_depth=torch.cat(scores).mean(0))


def _chain_hits(
    model: Eagle3, decoder: Decoder, taps: Tensor, ids: Tensor, lengths: Tensor, row_of: Tensor, *, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Per starting row and depth [B, T - 1, D]: the chain's token is right; the right one is among the best 8."""
    target = F.pad(row_of[ids][:, 2:], (0, 1), value=-1)
    rows = torch.arange(ids.shape[1] - 1, device=ids.device)
    is_known = (rows + 2 < lengths[:, None]) & (target >= 0)
    hits, recalls = [], []
    for step, logits in enumerate(unroll(model, taps, ids, embed=decoder.embed_tokens, num_steps=num_steps)):
        best = logits.topk(min(RECALL_AT, logits.shape[-1]), dim=-1).indices
        hits.append(((best[..., 0] == target) & is_known).roll(-step, dims=1))
        recalls.append(((best == target[..., None]).any(-1) & is_known).roll(-step, dims=1))
    return torch.stack(hits, -1), torch.stack(recalls, -1)
