"""One pass of the target over finished texts: the taps of every token, the first token's distribution, an audit.

Several texts share the pass, padded on the right: causal attention never looks there. Results are copied from the
device once, at the end, for all texts together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.decoding.target import TargetRunner
from blockpilot.models.decoder import Decoder
from blockpilot.replay.traces import PrefillColumns
from blockpilot.training.text_passes import read_taps

_KEPT_MASS = 1 - 1e-4  # of the first token's distribution
_MAX_KEPT = 1024
_AUDIT_ROWS = 256


@dataclass(frozen=True)
class FinishedText:
    prompt_ids: list[int]
    answer_ids: list[int]
    params: SamplingParams  # it was written with
    finish_reason: str = "length"

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    @property
    def num_anchors(self) -> int:
        """Answer tokens that have something after them."""
        return len(self.answer_ids) - 1


@dataclass(frozen=True)
class Reading:
    """What the target says of a text."""

    text: FinishedText
    taps: Tensor  # [T, num_taps * H]
    prefill: PrefillColumns
    num_disagreements: int


def pad_ids(texts: Sequence[FinishedText], device: torch.device) -> Tensor:
    """Token ids [S, T] of all texts, zeros behind the end of those that are shorter than the longest."""
    width = max(len(text.ids) for text in texts)
    return torch.tensor([text.ids + [0] * (width - len(text.ids)) for text in texts], device=device)


@torch.inference_mode()
def read_texts(runner: TargetRunner, texts: Sequence[FinishedText], *, tap_layers: tuple[int, ...]) -> list[Reading]:
    """The prefill of each has all logits of its first token, too."""
    if isinstance(runner, CpuTargetRunner):
        return [_read_exactly(runner, text, tap_layers) for text in texts]
    decoder = runner.decoder
    ids = pad_ids(texts, decoder.embed_tokens.weight.device)
    hidden, taps = (x.unflatten(0, ids.shape) for x in read_taps(decoder, ids, tap_layers))  # [S, T, ...]
    audits = [_audit(decoder, text, ids[row], hidden[row]) for row, text in enumerate(texts)]
    disagreements = torch.stack([count for _, count in audits]).tolist()
    last = torch.stack([hidden[row, len(text.prompt_ids) - 1] for row, text in enumerate(texts)])
    prefills = _prefill_columns(torch.stack([logits for logits, _ in audits]), last)
    return [
        Reading(text, taps[row, : len(text.ids)], prefills[row], disagreements[row]) for row, text in enumerate(texts)
    ]


def _read_exactly(runner: CpuTargetRunner, text: FinishedText, tap_layers: tuple[int, ...]) -> Reading:
    """In a pass that gives the bits of decoding."""
    first = len(text.prompt_ids)
    found = runner.read(text.ids, tap_layers, text.params, first=first - 1)
    assert found.taps is not None and found.hidden is not None
    chosen = found.best_ids()
    if text.params.is_filtered:
        chosen = choose_tokens(found.logits, text.params, range(first, len(text.ids) + 1)).tolist()
    disagreements = sum(ours != theirs for ours, theirs in zip(chosen, text.answer_ids, strict=False))
    (prefill,) = _prefill_columns(found.logits[:1], found.hidden[:1])
    return Reading(text, found.taps.clone(), prefill, disagreements)


def _audit(decoder: Decoder, text: FinishedText, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [V] of the first answer token, and how many answer tokens this pass would have chosen otherwise."""
    first, end = len(text.prompt_ids), len(text.ids)
    first_logits, count = hidden.new_empty(0), ids.new_zeros(())
    for start in range(first, end, _AUDIT_ROWS):
        places = range(start, min(start + _AUDIT_ROWS, end))
        logits = decoder.logits(hidden[start - 1 : places.stop - 1])
        if start == first:
            first_logits = logits[0].clone()  # the others need not be kept for its sake
        count = count + (choose_tokens(logits, text.params, places) != ids[start : places.stop]).sum()
    return first_logits, count


def _prefill_columns(logits: Tensor, hidden: Tensor) -> list[PrefillColumns]:
    """Of all texts: logits [S, V] behind their prompts, hidden states [S, H] there."""
    log_probs = logits.float().log_softmax(dim=-1)
    best = log_probs.exp().topk(min(_MAX_KEPT, log_probs.shape[-1]))
    running = best.values.double().cumsum(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    wanted = (best.indices, best.values, running, entropy, hidden.float(), logits.float())
    token_ids, probabilities, masses, entropies, states, whole = (x.cpu().numpy() for x in wanted)
    counts = np.minimum((masses < _KEPT_MASS).sum(axis=-1) + 1, masses.shape[-1])
    return [
        PrefillColumns(
            token_ids=token_ids[row, :count].astype(np.int32),
            probabilities=probabilities[row, :count],
            mass=float(masses[row, count - 1]),
            entropy=float(entropies[row]),
            hidden=states[row],
            logits=whole[row],
        )
        for row, count in enumerate(counts)
    ]
