"""What an EAGLE-3 head learns: to continue the target's hidden states by itself ("training-time test").

Chains start at every position and are unrolled for a few steps (`unroll` in `text_passes.py`). From the second step on
the head reads its own outputs, so that errors it will make when drafting are errors it trains on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.eagle3 import Eagle3
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.objective import DrafterTraining, LossTerms
from blockpilot.training.responses import ResponseSet, TextBatch
from blockpilot.training.text_passes import Embed, mixed_precision, own_embedding, unroll

STEP_DECAY = 0.8  # loss weight of each further unrolled step


class Eagle3Training(DrafterTraining):
    """Draws no random numbers: every position of every text is a start."""

    model: Eagle3
    row_of: Tensor

    def __init__(self, model: Eagle3, decoder: Decoder, run: DrafterRun, held_out: ResponseSet | None = None) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass died under these masks (PyTorch 2.11, H200)
        super().__init__(model, decoder, run, held_out)
        model.lm_head.weight.data.copy_(decoder.lm_head.weight[model.draft_token_ids])  # start from the target's rows
        self._loss = self._compiled(eagle3_loss)

    @property
    def block_size(self) -> int:
        return self.run.unrolled + 1

    def loss(self, texts: TextBatch, uniform: Tensor) -> LossTerms:
        _, taps = self._read_taps(self.decoder, texts.ids, self.model.config.tap_layers)
        embed, labels = own_embedding(self.model, self.decoder), self.row_of[texts.ids]
        with mixed_precision(self.decoder):
            return self._loss(self.model, embed, taps, texts, labels=labels, num_steps=self.run.unrolled)


def eagle3_loss(
    model: Eagle3, embed: Embed, taps: Tensor, texts: TextBatch, *, labels: Tensor, num_steps: int
) -> LossTerms:
    """Cross-entropy, one term per unrolled step; `labels` [B, T] are head rows, -1 where the head has none."""
    starts, ends = texts.prompt_lengths[:, None], texts.lengths[:, None]
    rows = torch.arange(texts.ids.shape[1] - 1, device=texts.ids.device)
    target = F.pad(labels[:, 2:], (0, 1), value=-1)  # row i -> token i + 2
    decay_sum = sum(STEP_DECAY**step for step in range(num_steps))
    sums, weights, hits = [], [], []
    for step, logits in enumerate(unroll(model, embed, taps, texts.ids, num_steps=num_steps)):
        is_known = (rows - step + 1 >= starts) & (rows + 2 < ends) & (target >= 0)
        losses = F.cross_entropy(logits.float().flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        sums.append(STEP_DECAY**step / decay_sum * (losses.view(target.shape) * is_known).sum())
        weights.append(is_known.sum().float())
        hits.append(((logits.argmax(-1) == target) & is_known).roll(-step, dims=1))
    is_inside = (rows + 1 >= starts) & (rows + num_steps + 1 < ends)  # starts of chains that fit into their answer
    return LossTerms(torch.stack(sums), torch.stack(weights), _chain_metrics(torch.stack(hits, -1), is_inside))


def _chain_metrics(hits: Tensor, is_inside: Tensor) -> dict[str, Tensor]:
    """Means over the chains inside; `hits` [B, T - 1, D] by starting row and depth."""
    count = is_inside.sum().clamp(min=1)
    accepted = hits.float().cumprod(-1).sum(-1)
    return {"emitted": 1 + (accepted * is_inside).sum() / count, "first": (hits[..., 0] & is_inside).sum() / count}
