"""Drafting at every anchor of a finished answer, one block size after the other, in batched passes.

The drafter is the one that decodes online, with its packed and rounded weights; `DFlashDrafter.rank` turns logits into
candidates here as there. Passes are cut so that their logits stay within a bound. Results stay on the device until they
are asked for, so that a GPU works through one pass while the next ones are prepared.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter, Ranking
from blockpilot.replay.anchor_attention import AnchorAttention
from blockpilot.replay.finished_text import FinishedText
from blockpilot.replay.traces import ABSENT, DraftColumns

LOGITS_PER_PASS = {"cpu": 1 << 24, "cuda": 1 << 28}  # a pass holds a few arrays of this many float32


class AnchorDrafts:
    """All blocks of one finished answer."""

    @torch.inference_mode()
    def __init__(self, drafter: DFlashDrafter, text: FinishedText, params: SamplingParams, *, max_size: int) -> None:
        self.drafter, self.params = drafter, params
        self.num_prompt_tokens, self.num_anchors = len(text.prompt_ids), len(text.answer_ids) - 1
        self._num_drafted = max(1, self.num_anchors)  # where there is no anchor, one block still tells the shapes
        self.ids = torch.tensor(text.prompt_ids + text.answer_ids, device=drafter.device)
        self.context = drafter.project_context(text.taps, torch.arange(len(self.ids), device=drafter.device))
        self.noise: Tensor | None = None  # [A + D, V], row i for the token behind anchor i
        if not params.is_greedy:
            first = self.num_prompt_tokens + 1
            self.noise = drafter.noise(params.seed, range(first, first + self._num_drafted + max_size - 2))

    @torch.inference_mode()
    def emitted(self, size: int) -> Tensor:
        """Tokens [A] that a chain drafted and checked at `size` emits from every anchor; bytes, on the device."""
        parts = [self._emitted(anchors, ranking) for anchors, ranking, _ in self._passes(size, num_candidates=1)]
        return torch.cat(parts)[: self.num_anchors]

    @torch.inference_mode()
    def record(self, size: int, num_candidates: int) -> tuple[Tensor, DraftColumns]:
        """The same, and what was offered."""
        emitted, columns = [], []
        for anchors, ranking, logits in self._passes(size, num_candidates):
            emitted.append(self._emitted(anchors, ranking))
            columns.append(self._columns(anchors, ranking, logits, num_candidates))
        joined = {name: torch.cat([part[name] for part in columns])[: self.num_anchors] for name in columns[0]}
        on_host = {name: column.cpu().numpy() for name, column in joined.items()}
        return torch.cat(emitted)[: self.num_anchors], DraftColumns(**on_host)

    def _passes(self, size: int, num_candidates: int) -> Iterator[tuple[Tensor, Ranking, Tensor]]:
        """Anchors [N] (as answer indices) with their ranking and logits [N, D, V], pass by pass."""
        head_size = self.drafter.model.config.layers.vocab_size
        if self.drafter.token_ids is not None:
            head_size = len(self.drafter.token_ids)
        count = max(1, LOGITS_PER_PASS[self.drafter.device.type] // (head_size * (size - 1)))
        for start in range(0, self._num_drafted, count):
            end = min(start + count, self._num_drafted)
            anchors = torch.arange(start, end, device=self.drafter.device)
            reach = self.num_prompt_tokens + end - 1
            hidden = self._run(anchors + self.num_prompt_tokens, size, reach=reach)[:, 1:]  # [N, D, H]
            logits = self.drafter.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
            offsets = torch.arange(size - 1, device=anchors.device)
            ranking = self.drafter.rank(
                hidden,
                logits,
                anchor_ids=self.ids[anchors + self.num_prompt_tokens],
                temperature=self.params.temperature,
                noise=None if self.noise is None else self.noise[anchors[:, None] + offsets],
                num_candidates=num_candidates,
            )
            yield anchors, ranking, logits

    def _run(self, positions: Tensor, size: int, *, reach: int) -> Tensor:
        """Hidden states [N, B, H] of the blocks whose anchors stand at `positions`, up to `reach`."""
        drafter = self.drafter
        offsets = torch.arange(size, device=positions.device)
        block_ids = torch.full((len(positions), size), drafter.model.config.mask_token_id, device=positions.device)
        block_ids[:, 0] = self.ids[positions]
        attend = AnchorAttention(self.context, positions, reach=reach)
        block_positions = (positions[:, None] + offsets).flatten()
        hidden = drafter.model(
            drafter.embed(block_ids.flatten()), block_positions, attend, offsets.repeat(len(positions))
        )
        return hidden.view(len(positions), size, -1)

    def _labels(self, anchors: Tensor, num_depths: int) -> Tensor:
        """The answer's own tokens [N, D] behind each anchor; -1 beyond its end."""
        places = anchors[:, None] + self.num_prompt_tokens + torch.arange(1, num_depths + 1, device=anchors.device)
        return self.ids[places.clamp(max=len(self.ids) - 1)].masked_fill(places >= len(self.ids), -1)

    def _emitted(self, anchors: Tensor, ranking: Ranking) -> Tensor:
        chain = chain_tokens(ranking)
        accepted = (chain == self._labels(anchors, chain.shape[1])).cumprod(dim=-1).sum(dim=-1)
        return torch.minimum(accepted + 1, self.num_anchors - anchors).to(torch.uint8)

    def _columns(self, anchors: Tensor, ranking: Ranking, logits: Tensor, num_candidates: int) -> dict[str, Tensor]:
        shown = ranking.token_ids[..., :num_candidates]
        is_true = shown == self._labels(anchors, shown.shape[1])[..., None]
        true_ranks = is_true.int().argmax(dim=-1).masked_fill(~is_true.any(dim=-1), ABSENT)
        columns = {
            "log_probs": ranking.log_probs[..., :num_candidates],
            "entropy": entropy(logits, self.params),
            "true_ranks": true_ranks.to(torch.uint8),
        }
        if ranking.first is not None and ranking.pairwise is not None:
            columns["first"] = ranking.first[:, :num_candidates]
            columns["pairwise"] = ranking.pairwise[..., :num_candidates, :num_candidates]
        return columns


def chain_tokens(ranking: Ranking) -> Tensor:
    """The chain that would be checked [N, D]: at every depth the likeliest child of the one chosen before."""
    if ranking.first is None or ranking.pairwise is None:
        return ranking.token_ids[..., 0]
    ranks = [ranking.first.argmax(dim=-1)]
    rows = torch.arange(len(ranking.first), device=ranking.first.device)
    for depth in range(ranking.pairwise.shape[1]):
        ranks.append(ranking.pairwise[rows, depth, ranks[-1]].argmax(dim=-1))
    return ranking.token_ids.gather(-1, torch.stack(ranks, dim=1)[..., None])[..., 0]


def entropy(logits: Tensor, params: SamplingParams) -> Tensor:
    """Entropy [...] of logits [..., V] at the request's temperature (1 where it is greedy)."""
    scores = logits.float() if params.is_greedy else logits.float() / params.temperature
    log_mass = scores.logsumexp(dim=-1)
    return log_mass - ((scores - log_mass[..., None]).exp_() * scores).sum(dim=-1)
