"""How good a drafter is on texts it has not seen, from one pass over finished answers.

Greedy decoding does not depend on what was drafted, so a finished greedy answer tells everything: draft at every
anchor, count how many drafted tokens the answer confirms, then walk from anchor to anchor as decoding would. This is
`tau` as decoding measures it, up to rounding. For EAGLE-3 one unrolling does it: as long as all drafted tokens are
right they equal the text's, so feeding the text's tokens drafts the chains of all anchors at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import CandidateSelector, DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.text.repetition import loop_free_steps
from blockpilot.training.responses import ResponseSet, TextBatch
from blockpilot.training.text_passes import (
    Blocks,
    draft_hidden,
    head_rows,
    head_weight,
    make_blocks,
    read_taps,
    unroll,
)

_RECALL_AT = 8
ANCHORS_PER_PASS = 64  # DFlash blocks per text


@dataclass(frozen=True)
class TauReport:
    tau_mean: float  # mean over answers of emitted tokens per step
    tau_pooled: float
    tau_loop_free: float  # only steps that start before the answer first repeats itself
    accuracy: list[float]  # per depth: the first choice is right, given all anchors
    recall: list[float]  # per depth: the right token is among the best 8
    tau_by_source: dict[str, float]  # loop-free, by what the texts were written for


@dataclass(frozen=True)
class _Drafts:
    """Drafts at N places of every text of a batch."""

    hits: Tensor  # [B, N, D], the chain's token is right
    recalls: Tensor  # [B, N, D], the right token is among the best 8
    is_anchor: Tensor  # [B, N], an answer token stands there
    is_whole: Tensor  # [B, N], and the draft ends inside the text


@torch.inference_mode()
def evaluate_drafter(
    model: DFlash | Eagle3,
    decoder: Decoder,
    responses: ResponseSet,
    *,
    block_size: int,
    width: int,
    batch_size: int = 16,
) -> TauReport:
    """Tau of blocks or chains of `block_size` from every anchor of finished greedy answers."""
    device = decoder.embed_tokens.weight.device
    emitted: list[Tensor] = []
    scores = [torch.zeros(0, block_size - 1, 2)]
    for indices in torch.arange(len(responses)).split(batch_size):
        texts = responses.batch(indices, width).to(device)
        _, taps = read_taps(decoder, texts.ids, model.config.tap_layers)
        if isinstance(model, Eagle3):
            drafts = _draft_chains(model, decoder, taps, texts, num_steps=block_size - 1)
        else:
            drafts = _draft_blocks(model, decoder, taps, texts, block_size=block_size)
        lengths = 1 + drafts.hits.long().cumprod(-1).sum(-1)
        emitted += [row[is_anchor].cpu() for row, is_anchor in zip(lengths, drafts.is_anchor, strict=True)]
        scores.append(torch.stack((drafts.hits, drafts.recalls), -1)[drafts.is_whole].float().cpu())
    everything = torch.cat(scores)
    per_depth = everything.sum(0) / max(1, len(everything))  # zeros where no text holds a whole draft
    answers = [responses.answer_ids(index, width) for index in range(len(responses))]
    walks: list[_Walk] = []
    for index, (lengths, answer) in enumerate(zip(emitted, answers, strict=True)):
        if steps := _walk(lengths, answer):
            walks.append(_Walk(responses.source_name(index), steps, loop_free_steps(answer, steps)))
    return _summarise(walks, per_depth)


def _draft_chains(model: Eagle3, decoder: Decoder, taps: Tensor, texts: TextBatch, *, num_steps: int) -> _Drafts:
    """Chains of EAGLE-3, from every row of the texts."""
    row_of = head_rows(model.draft_token_ids, decoder.config.vocab_size).to(texts.ids.device)
    target = F.pad(row_of[texts.ids][:, 2:], (0, 1), value=-1)
    rows = torch.arange(texts.ids.shape[1] - 1, device=texts.ids.device)
    starts, ends = texts.prompt_lengths[:, None] - 1, texts.lengths[:, None] - 1
    is_known = (rows + 1 < ends) & (target >= 0)
    hits, recalls = [], []
    for step, logits in enumerate(unroll(model, decoder, taps, texts.ids, num_steps=num_steps)):
        best = logits.topk(min(_RECALL_AT, logits.shape[-1]), dim=-1).indices
        hits.append(((best[..., 0] == target) & is_known).roll(-step, dims=1))
        recalls.append(((best == target[..., None]).any(-1) & is_known).roll(-step, dims=1))
    is_anchor, is_whole = ((rows >= starts) & (rows < end) for end in (ends, ends - num_steps))
    return _Drafts(torch.stack(hits, -1), torch.stack(recalls, -1), is_anchor, is_whole)


def _draft_blocks(model: DFlash, decoder: Decoder, taps: Tensor, texts: TextBatch, *, block_size: int) -> _Drafts:
    """Blocks of DFlash at every answer token, some at a time."""
    head = head_weight(model, decoder)
    most = max(1, int((texts.lengths - texts.prompt_lengths).max()))
    columns = []
    for steps in torch.arange(most, device=taps.device).split(ANCHORS_PER_PASS):
        anchors = texts.prompt_lengths[:, None] + steps
        is_anchor = anchors < texts.lengths[:, None]
        anchors, sizes = anchors.clamp(max=texts.ids.shape[1] - 1), torch.full_like(anchors, block_size)
        blocks = make_blocks(texts, anchors=anchors, sizes=sizes, full_size=block_size)
        hits, recalls = _score(model, decoder, taps, blocks, head=head)
        columns.append((hits, recalls, is_anchor, is_anchor & blocks.is_valid.all(-1)))
    return _Drafts(*(torch.cat(column, dim=1) for column in zip(*columns, strict=True)))


def _score(model: DFlash, decoder: Decoder, taps: Tensor, blocks: Blocks, *, head: Tensor) -> tuple[Tensor, Tensor]:
    """Per anchor and depth: the drafted chain's token is right [B, A, D]; the right token is among the best 8."""
    hidden = draft_hidden(model, decoder, taps, blocks)[:, :, 1:].to(head.dtype)
    logits = F.linear(hidden, head).float()
    width = model.config.selector_top_k if model.candidate_selector is not None else _RECALL_AT
    best = logits.topk(min(width, logits.shape[-1]), dim=-1)
    rows = model.draft_token_ids
    tokens = best.indices if rows is None else rows.to(taps.device)[best.indices]  # [B, A, D, K]
    recall = (tokens[..., :_RECALL_AT] == blocks.labels[..., None]).any(-1)
    chosen = tokens[..., 0]
    if model.candidate_selector is not None:
        picks = _walk_selector(model.candidate_selector, best.values, tokens, hidden, blocks.anchor_ids)
        chosen = torch.stack(list(picks), dim=-1)
    return (chosen == blocks.labels) & blocks.is_valid, recall


def _walk_selector(
    selector: CandidateSelector, values: Tensor, tokens: Tensor, hidden: Tensor, anchor_ids: Tensor
) -> Iterator[Tensor]:
    """The chain DFlash 2 drafts, [B, A] at every depth: the best child of the one chosen before."""
    parent, hidden = anchor_ids, hidden.to(selector.successor_codebook.dtype)
    for depth in range(tokens.shape[2]):
        pair = selector(parent[..., None], hidden[:, :, depth], tokens[:, :, depth])
        pick = (values[:, :, depth] + pair[..., 0, :].float()).argmax(-1, keepdim=True)
        parent = tokens[:, :, depth].gather(-1, pick)[..., 0]
        yield parent


def _walk(emitted: Tensor, answer: list[int]) -> list[int]:
    """Emitted lengths of the steps decoding would take."""
    place, steps = 0, []
    while place + 1 < len(answer):
        steps.append(min(int(emitted[place]), len(answer) - 1 - place))
        place += steps[-1]
    return steps


@dataclass(frozen=True)
class _Walk:
    """Emitted lengths of one answer's steps."""

    source: str
    steps: list[int]
    free: list[int]  # of those that start before the first repetition

    @property
    def tau_free(self) -> float:
        return sum(self.free) / len(self.free)


def _summarise(walks: list[_Walk], per_depth: Tensor) -> TauReport:
    everything = [count for walk in walks for count in walk.steps]
    by_source: dict[str, list[float]] = {}
    for walk in walks:
        by_source.setdefault(walk.source, []).append(walk.tau_free)
    return TauReport(
        tau_mean=sum(sum(walk.steps) / len(walk.steps) for walk in walks) / max(1, len(walks)),
        tau_pooled=sum(everything) / max(1, len(everything)),
        tau_loop_free=sum(walk.tau_free for walk in walks) / max(1, len(walks)),
        accuracy=[round(x, 4) for x in per_depth[:, 0].tolist()],
        recall=[round(x, 4) for x in per_depth[:, 1].tolist()],
        tau_by_source={name: round(sum(taus) / len(taus), 3) for name, taus in sorted(by_source.items())},
    )
