"""One pass of the target over a finished text: the taps of every token, the first token's distribution, an audit."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.models.decoder import Decoder
from blockpilot.replay.traces import PrefillColumns
from blockpilot.training.dense_attention import CausalAttention

KEPT_MASS = 1 - 1e-4  # of the first token's distribution
MAX_KEPT = 1024
AUDIT_ROWS = 256


@dataclass(frozen=True)
class FinishedText:
    prompt_ids: list[int]
    answer_ids: list[int]
    taps: Tensor  # [T, num_taps * H]
    prefill: PrefillColumns
    num_disagreements: int


@torch.inference_mode()
def read_text(
    decoder: Decoder,
    prompt_ids: list[int],
    answer_ids: list[int],
    *,
    tap_layers: tuple[int, ...],
    params: SamplingParams,
) -> FinishedText:
    ids = torch.tensor(prompt_ids + answer_ids, device=decoder.embed_tokens.weight.device)
    hidden, taps = decoder(ids, torch.arange(len(ids), device=ids.device), CausalAttention(1), tap_layers)
    assert taps is not None
    num_disagreements = 0
    for start in range(len(prompt_ids), len(ids), AUDIT_ROWS):
        end = min(start + AUDIT_ROWS, len(ids))
        logits = decoder.logits(hidden[start - 1 : end - 1])
        if start == len(prompt_ids):
            prefill = _prefill_columns(logits[0], hidden[start - 1])
        chosen = choose_tokens(logits, params, range(start, end))
        num_disagreements += int((chosen != ids[start:end]).sum())
    return FinishedText(prompt_ids, answer_ids, taps, prefill, num_disagreements)


def _prefill_columns(logits: Tensor, hidden: Tensor) -> PrefillColumns:
    log_probs = logits.float().log_softmax(dim=-1)
    best = log_probs.exp().topk(min(MAX_KEPT, len(log_probs)))
    running = best.values.double().cumsum(0)
    count = min(int((running < KEPT_MASS).sum()) + 1, len(running))
    return PrefillColumns(
        token_ids=best.indices[:count].cpu().numpy().astype(np.int32),
        probabilities=best.values[:count].cpu().numpy(),
        mass=float(running[count - 1]),
        entropy=float(-(log_probs.exp() * log_probs).sum()),
        hidden=hidden.float().cpu().numpy(),
    )
