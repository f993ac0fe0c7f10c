"""EAGLE-3 training as the trainer runs it, and the evaluation of a finished head."""

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.dflash_objective import mixed_precision, read_taps
from blockpilot.training.eagle3_objective import eagle3_loss, own_embedding, unroll
from blockpilot.training.evaluation import RECALL_AT, TauReport, mean_scores, tau_report
from blockpilot.training.loss_terms import LossTerms
from blockpilot.training.responses import ResponseSet


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
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass died under these masks (PyTorch 2.11, H200)
        self.model, self.decoder, self.num_unrolled = model, decoder, num_unrolled
        self.held_out, self.width = held_out, width
        model.draft_token_ids = model.draft_token_ids.to(decoder.lm_head.weight.device)
        model.lm_head.weight.data.copy_(decoder.lm_head.weight[model.draft_token_ids])  # start from the target's rows
        self.row_of = model.draft_rows()
        self._loss = torch.compile(eagle3_loss) if is_compiled else eagle3_loss
        self._read_taps = torch.compile(read_taps) if is_compiled else read_taps

    @property
    def num_random(self) -> int:
        return 0  # every position of every text is a start

    def loss(self, ids: Tensor, lengths: Tensor, prompt_lengths: Tensor, uniform: Tensor) -> LossTerms:
        _, taps = self._read_taps(self.decoder, ids, self.model.config.tap_layers)
        with mixed_precision(self.decoder):
            return self._loss(
                self.model,
                taps,
                ids,
                lengths,
                prompt_lengths,
                embed=own_embedding(self.model, self.decoder),
                labels=self.row_of[ids],
                num_steps=self.num_unrolled,
            )

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        size = self.num_unrolled + 1
        with mixed_precision(self.decoder):
            report = evaluate_eagle3(self.model, self.decoder, self.held_out, block_size=size, width=self.width)
        return asdict(report)


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
            whole = slice(start, max(start, end - block_size + 1))  # chains that end inside the text
            scores.append(torch.stack((hits[row, whole], recalls[row, whole]), -1).float())
    return tau_report(emitted, responses, width=width, per_depth=mean_scores(scores, block_size - 1))


def _chain_hits(
    model: Eagle3, decoder: Decoder, taps: Tensor, ids: Tensor, lengths: Tensor, row_of: Tensor, *, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Per starting row and depth [B, T - 1, D]: the chain's token is right; the right one is among the best 8."""
    target = F.pad(row_of[ids][:, 2:], (0, 1), value=-1)
    rows = torch.arange(ids.shape[1] - 1, device=ids.device)
    is_known = (rows + 2 < lengths[:, None]) & (target >= 0)
    hits, recalls = [], []
    for step, logits in enumerate(unroll(model, taps, ids, embed=own_embedding(model, decoder), num_steps=num_steps)):
        best = logits.topk(min(RECALL_AT, logits.shape[-1]), dim=-1).indices
        hits.append(((best[..., 0] == target) & is_known).roll(-step, dims=1))
        recalls.append(((best == target[..., None]).any(-1) & is_known).roll(-step, dims=1))
    return torch.stack(hits, -1), torch.stack(recalls, -1)
