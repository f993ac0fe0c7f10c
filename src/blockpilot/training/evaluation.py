"""How good a drafter is on texts it has not seen, from one pass over finished answers.

Greedy decoding does not depend on what was drafted, so a finished greedy answer tells everything: draft at every
anchor, count how many drafted tokens the answer confirms, then walk from anchor to anchor as decoding would. This is
`tau` as decoding measures it, up to rounding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import CandidateSelector, DFlash
from blockpilot.text.repetition import find_loop
from blockpilot.training.blocks import Blocks, make_blocks
from blockpilot.training.dflash_objective import draft_hidden, read_taps
from blockpilot.training.responses import ResponseSet

RECALL_AT = 8


@dataclass(frozen=True)
class TauReport:
    tau_mean: float  # mean over answers of emitted tokens per step
    tau_pooled: float
    tau_loop_free: float  # only steps that start before the answer first repeats itself
    accuracy: list[float]  # per depth: the first choice is right, given all anchors
    recall: list[float]  # per depth: the right token is among the best 8


@torch.inference_mode()
def evaluate_dflash(
    model: DFlash,
    decoder: Decoder,
    responses: ResponseSet,
    *,
    block_size: int,
    width: int,
    batch_size: int = 16,
    anchors_per_pass: int = 64,
) -> TauReport:
    """Tau of blocks of `block_size` from every anchor of finished greedy answers."""
    device = decoder.embed_tokens.weight.device
    emitted: list[Tensor] = []
    scores: list[Tensor] = []
    for first in range(0, len(responses), batch_size):
        indices = torch.arange(first, min(first + batch_size, len(responses)))
        ids, lengths, prompt_lengths = (x.to(device) for x in responses.batch(indices, width))
        _, taps = read_taps(decoder, ids, model.config.tap_layers)
        lengths_at = [[torch.empty(0, dtype=torch.int64)] for _ in indices]
        for start in range(0, int((lengths - prompt_lengths).max()), anchors_per_pass):
            anchors = prompt_lengths[:, None] + torch.arange(start, start + anchors_per_pass, device=device)
            is_anchor = anchors < lengths[:, None]
            sizes = torch.full_like(anchors, block_size)
            blocks = make_blocks(ids, lengths, anchors=anchors.clamp(max=width - 1), sizes=sizes, full_size=block_size)
            hits, recall = _score(model, decoder, taps, ids, blocks)
            scores.append(torch.stack((hits, recall), -1)[is_anchor & blocks.is_valid.all(-1)].float())
            for row, found in enumerate(lengths_at):
                found.append(1 + hits[row][is_anchor[row]].cumprod(-1).sum(-1).cpu())
        emitted += [torch.cat(found) for found in lengths_at]
    return tau_report(emitted, responses, width=width, per_depth=mean_scores(scores, block_size - 1))


def mean_scores(scores: list[Tensor], num_depths: int) -> Tensor:
    """Mean [depths, 2] of accuracy and recall over all whole blocks; zeros where no text holds one."""
    everything = torch.cat([torch.zeros(0, num_depths, 2), *(score.cpu() for score in scores)])
    return everything.sum(0) / max(1, len(everything))


def tau_report(emitted: list[Tensor], responses: ResponseSet, *, width: int, per_depth: Tensor) -> TauReport:
    """Walk every text; `emitted[i][k]` is what a step from the k-th answer token of text i would emit."""
    answers = [responses.answer_ids(index, width) for index in range(len(responses))]
    walks = [_walk(lengths, answer) for lengths, answer in zip(emitted, answers, strict=True)]
    return _summarise([walk for walk in walks if walk[0]], per_depth)


def head_rows(model: DFlash, decoder: Decoder) -> Tensor:
    """The rows of the target's head that the drafter looks at."""
    weight = decoder.lm_head.weight
    return weight if model.draft_token_ids is None else weight[model.draft_token_ids.to(weight.device)]


def _score(model: DFlash, decoder: Decoder, taps: Tensor, ids: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Per anchor and depth: the drafted chain's token is right [B, A, D]; the right token is among the best 8."""
    head = head_rows(model, decoder)
    hidden = draft_hidden(model, taps, blocks, ids=ids, embed=decoder.embed_tokens)[:, :, 1:].to(head.dtype)
    logits = F.linear(hidden, head).float()
    width = model.config.selector_top_k if model.candidate_selector is not None else RECALL_AT
    best = logits.topk(min(width, logits.shape[-1]), dim=-1)
    rows = model.draft_token_ids
    tokens = best.indices if rows is None else rows.to(ids.device)[best.indices]  # [B, A, D, K]
    recall = (tokens[..., :RECALL_AT] == blocks.labels[..., None]).any(-1)
    chosen = tokens[..., 0]
    if model.candidate_selector is not None:
        chosen = _walk_selector(model.candidate_selector, best.values, tokens, hidden, ids.gather(1, blocks.anchors))
    return (chosen == blocks.labels) & blocks.is_valid, recall


def _walk_selector(
    selector: CandidateSelector, values: Tensor, tokens: Tensor, hidden: Tensor, anchor_ids: Tensor
) -> Tensor:
    """The chain DFlash 2 drafts [B, A, D]: at every depth the best child of the one chosen before."""
    parent, chosen = anchor_ids, []
    hidden = hidden.to(selector.successor_codebook.dtype)
    for depth in range(tokens.shape[2]):
        pair = selector(parent[..., None], hidden[:, :, depth], tokens[:, :, depth])
        pick = (values[:, :, depth] + pair[..., 0, :].float()).argmax(-1, keepdim=True)
        parent = tokens[:, :, depth].gather(-1, pick)[..., 0]
        chosen.append(parent)
    return torch.stack(chosen, dim=-1)


def _walk(emitted: Tensor, answer: list[int]) -> tuple[list[int], list[int]]:
    """Emitted lengths of the steps decoding would take, all and those that start before the first repetition."""
    loop, place, steps, loop_free = find_loop(answer), 0, [], []
    while place + 1 < len(answer):
        count = min(int(emitted[place]), len(answer) - 1 - place)
        steps.append(count)
        if place < loop:
            loop_free.append(count)
        place += count
    return steps, loop_free


def _summarise(walks: list[tuple[list[int], list[int]]], per_depth: Tensor) -> TauReport:
    everything = [count for steps, _ in walks for count in steps]
    return TauReport(
        tau_mean=sum(sum(steps) / len(steps) for steps, _ in walks) / max(1, len(walks)),
        tau_pooled=sum(everything) / max(1, len(everything)),
        tau_loop_free=sum(sum(free) / len(free) for _, free in walks) / max(1, len(walks)),
        accuracy=[round(x, 4) for x in per_depth[:, 0].tolist()],
        recall=[round(x, 4) for x in per_depth[:, 1].tolist()],
    )
