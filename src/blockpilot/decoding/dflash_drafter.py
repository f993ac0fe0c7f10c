"""Drafting with DFlash: taps in, candidates of a whole block out.

The context cache has one row per committed token (the anchor excepted), exactly like the target's. A block is appended
behind it for one pass and never kept. With sampling, the drafter ranks by logits / temperature + the same noise that
the target will add, so the two draw alike wherever they agree.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.cache.attention import RaggedAttention, Segment
from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.device import Placement
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.decoding.drafter import DraftRequest, Observation, join_taps
from blockpilot.models.dflash import DFlash
from blockpilot.models.noise import gumbel_noise
from blockpilot.models.packing import pack_linear, pack_linears, quantize_linears


class DFlashDrafter:
    num_spare = 0  # slots for rows that only round up a pass

    def __init__(
        self,
        model: DFlash,
        placement: Placement,
        *,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        name: str = "dflash",
    ) -> None:
        """`embed` and `head` are the target's; the head may have those rows alone that the drafter looks at."""
        self.name = name
        self.block_size = model.config.block_size
        self.max_block_size = MAX_BLOCK_SIZE
        self.can_resume = True
        self.tap_layers = model.config.tap_layers
        self.model, self.embed, self.head, self.device = model, embed, head, placement.device
        self.token_ids = None if model.draft_token_ids is None else model.draft_token_ids.to(self.device)
        weight = model.context_weight()
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        projection.weight = nn.Parameter(weight.detach(), requires_grad=False)
        backend = placement.linear_backend
        if backend == "int8":  # a rounded drafter drafts as well, and its weights are read at every step
            quantize_linears(nn.ModuleList([model, projection]))
        self.context_projection = pack_linear(projection, backend)
        pack_linears(model, backend)
        self.cache = self._make_cache(placement)

    def _make_cache(self, placement: Placement) -> SlotCache:
        return SlotCache(self.model.config.layers, placement, num_open=MAX_BLOCK_SIZE, num_spare=self.num_spare)

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        taps = join_taps(observations)
        positions = [
            self.cache.lengths[observation.slot] + i
            for observation in observations
            for i in range(len(observation.token_ids))
        ]
        layers = self.project_context(taps, torch.tensor(positions, device=self.device))
        counts = [len(observation.token_ids) for observation in observations]
        self.cache.store([observation.slot for observation in observations], counts, layers)

    def project_context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer, the keys and values [n, Hkv, D] of committed tokens."""
        return self.model.split_context(self.context_projection(self.model.context(taps)), positions)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        hidden = self._run_blocks(requests)
        ends = torch.tensor([request.block_size for request in requests]).cumsum(0).tolist()
        behind = [hidden[end - r.block_size + 1 : end] for end, r in zip(ends, requests, strict=True)]  # the anchors
        logits = self.head(torch.cat(behind)).split([len(states) for states in behind])
        found = []
        for request, states, own in zip(requests, behind, logits, strict=True):
            arrays = self._rank_one(request, own, states).map(lambda part: part[0].cpu().numpy())
            found.append(arrays.cut(request.block_size - 1, request.num_candidates))
        return found

    def forget(self, slot: int) -> None:
        self.cache.reset(slot)

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        self.cache.extend(slot, len(token_ids))

    def _run_blocks(self, requests: Sequence[DraftRequest]) -> Tensor:
        """One pass over all blocks: [anchor, mask, mask, ...] of each request, packed."""
        mask_id = self.model.config.mask_token_id
        ids: list[int] = []
        positions: list[int] = []
        offsets: list[int] = []
        for request in requests:
            ids += [request.anchor_id] + [mask_id] * (request.block_size - 1)
            positions += range(request.position, request.position + request.block_size)
            offsets += range(request.block_size)
        segments = [Segment(request.slot, request.block_size, is_bidirectional=True) for request in requests]
        attend = RaggedAttention(self.cache, segments)
        packed = torch.tensor([ids, positions, offsets], device=self.device)
        return self.model(self.embed(packed[0]), packed[1], attend, packed[2])

    def _rank_one(self, request: DraftRequest, logits: Tensor, hidden: Tensor) -> Draft[Tensor]:
        noise, params = None, request.params
        if not params.is_greedy:
            positions = range(request.position + 1, request.position + request.block_size)
            noise = self.noise(params.seed, positions)[None]
        return self.rank(
            hidden[None],
            logits[None],
            anchor_ids=torch.tensor([request.anchor_id], device=self.device),
            temperature=params.temperature,
            noise=noise,
            num_candidates=request.num_candidates,
        )

    def rank(
        self,
        hidden: Tensor,
        logits: Tensor,
        *,
        anchor_ids: Tensor,
        temperature: float,
        noise: Tensor | None,
        num_candidates: int,
    ) -> Draft[Tensor]:
        """The best tokens of N blocks; `hidden` [N, D, H] and `logits` [N, D, V] are those of positions 1 .. B-1.

        `noise` [N, D, V] is the target's own for those positions; None is greedy. A selector looks at a number of
        candidates of its own, whatever is asked for.
        """
        scores = logits if noise is None else logits.float() / temperature + noise
        selector = self.model.candidate_selector
        width = self.model.config.selector_top_k if selector is not None else num_candidates
        values, token_ids, log_probs = self.rank_tokens(scores, min(width, scores.shape[-1]))  # [N, D, K]
        if selector is None:
            return Draft(token_ids, log_probs)
        scale = 1.0 if noise is None else 1 / temperature
        return Draft(token_ids, log_probs, *self.score_pairs(anchor_ids, values, token_ids, hidden, scale))

    def rank_tokens(self, scores: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, token ids and log-probabilities [N, D, K] of the best tokens; float32."""
        wide = scores.float()
        if num_best == 1:
            best, places = wide.max(dim=-1, keepdim=True)  # faster, and the first of equals
        else:
            best, places = wide.topk(num_best, dim=-1)
        ids = places if self.token_ids is None else self.token_ids[places]
        return best, ids, best - wide.logsumexp(dim=-1, keepdim=True)

    def noise(self, seed: int, positions: Sequence[int]) -> Tensor:
        """The target's own noise [N, V] for the tokens this drafter looks at."""
        noise = gumbel_noise(seed, positions, vocab_size=self.model.config.layers.vocab_size, device=self.device)
        return noise if self.token_ids is None else noise[:, self.token_ids]

    def score_pairs(
        self, anchor_ids: Tensor, values: Tensor, ids: Tensor, hidden: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """log p(child | parent) among the candidates: after the anchor [N, K], and between positions [N, D-1, K, K]."""
        selector = self.model.candidate_selector
        assert selector is not None
        first = values[:, 0] + scale * selector(anchor_ids[:, None], hidden[:, 0], ids[:, 0])[:, 0]
        parents, children, states = (x.flatten(0, 1) for x in (ids[:, :-1], ids[:, 1:], hidden[:, 1:]))  # packed rows
        later = selector(parents, states, children).unflatten(0, (len(ids), ids.shape[1] - 1))
        later = values[:, 1:, None] + scale * later
        return F.log_softmax(first.float(), dim=-1), F.log_softmax(later.float(), dim=-1)
