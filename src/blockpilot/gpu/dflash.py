"""DFlash on a GPU: drafting and observing as CUDA graphs, one for each shape.

Ranking, with the noise of requests that sample, is part of the graph, and drafts come back in one wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.device import Placement
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.gpu.buckets import (
    BLOCKS,
    MAX_DRAFT_ROWS,
    OBSERVED,
    REQUESTS,
    context_bucket,
    context_buckets,
    round_up,
    with_shapes,
)
from blockpilot.gpu.device import capture, check_memory, graph_pool, wait_for
from blockpilot.gpu.fused import FusedDFlash
from blockpilot.gpu.interface import Noise, Selector
from blockpilot.gpu.plan import PassPlan
from blockpilot.gpu.views import RecordedViews
from blockpilot.models.dflash import CandidateSelector, DFlash
from blockpilot.pilots.growth import MAX_WIDTH


@dataclass(eq=False)
class DraftPass:
    plan: PassPlan
    fetched: Draft[NDArray[Any]]  # of R requests, in the host's memory
    run: Callable[[], None] = field(init=False)
    fetch: Callable[[], None] = field(init=False)  # brings the draft to the host
    draft: Draft[Tensor] = field(init=False)  # on the device, of the last run
    _shown: dict[tuple[int, int, int], HostDraft] = field(default_factory=dict)

    def show(self, row: int, depth: int, num_candidates: int) -> HostDraft:
        """One request's draft: a view of `fetched`, made once because that buffer is always the same."""
        key = (row, depth, num_candidates)
        if key not in self._shown:
            self._shown[key] = self.fetched.map(lambda part: part[row]).cut(depth, num_candidates)
        return self._shown[key]


class GpuDFlashDrafter(DFlashDrafter):
    num_spare = 1

    def __init__(self, model: DFlash, placement: Placement, **options: Any) -> None:
        super().__init__(model, placement, **options)
        self.fused = FusedDFlash(self.model, self.cache.rows)
        self.context_weight = self.model.context_weight().detach()
        self._head_weight = cast(nn.Linear, self.head).weight
        num_rows = min(MAX_DRAFT_ROWS, round_up(placement.num_slots, REQUESTS) * MAX_BLOCK_SIZE)
        num_logits, hidden_size = self._head_weight.shape
        needed = num_rows * (num_logits + hidden_size) * placement.dtype.itemsize
        check_memory(self.device, needed, "the drafter's results")
        self._hidden, self._logits = (self.cache.rows.new_empty(num_rows, size) for size in (hidden_size, num_logits))
        self._spare_slot = placement.num_slots
        self._blocks = with_shapes(BLOCKS, placement.own_shapes)
        self._pool = graph_pool(self.device)
        self.views = RecordedViews(
            self.cache, self._store_view, buckets=OBSERVED, max_rows=MAX_DRAFT_ROWS, pool=self._pool
        )
        self._drafts: dict[tuple[int, int, int, int], DraftPass] = {}
        # a selector looks at candidates of its own, however many are asked for
        self._widths = (1, MAX_WIDTH) if self.model.candidate_selector is None else (MAX_WIDTH,)

    def bind(self, taps: Tensor) -> None:
        """Say where the target's recorded passes leave their taps: what is observed from there is recorded, too."""
        self.views.taps = taps

    def prepare(self, num_requests: int) -> None:
        """Record drafts of the usual sizes, and observing from the target's buffer."""
        rounded = round_up(num_requests, REQUESTS)
        usual = round_up(self.block_size + 2, self._blocks)
        for count in (size for size in self._blocks if 4 <= size <= usual):
            for width in self._widths:
                if rounded * count <= MAX_DRAFT_ROWS:
                    for context in context_buckets(self.cache.capacity):
                        self._find_draft(rounded, count, context, width)
        self.views.prepare(rounded)

    def observe(self, observations: Sequence[Observation]) -> None:
        if not self.views.observe(observations):
            super().observe(observations)

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        """The drafts lie in buffers that later ones write again: read them before."""
        if not self.can_run(len(requests), max([request.block_size for request in requests])):
            return super().propose(requests)
        draft = self.find_pass(requests)
        self.write(draft, requests)
        draft.run()
        draft.fetch()
        wait_for(self.device)
        return [draft.show(row, request.block_size - 1, request.num_candidates) for row, request in enumerate(requests)]

    @property
    def max_width(self) -> int:
        """Candidates of a position that a draft ranks."""
        return MAX_WIDTH if self.model.candidate_selector is None else self.model.config.selector_top_k

    def can_run(self, num_requests: int, block_size: int) -> bool:
        """Whether such a draft is recorded, or will be when it first occurs."""
        return round_up(num_requests, REQUESTS) * round_up(block_size, self._blocks) <= MAX_DRAFT_ROWS

    def find_passes(self, num_requests: int, block_size: int, num_candidates: int) -> list[DraftPass]:
        """Those for short contexts and, where slots are long, for long ones."""
        shape = round_up(num_requests, REQUESTS), round_up(block_size, self._blocks)
        width = self._width(num_candidates)
        return [self._find_draft(*shape, context, width) for context in context_buckets(self.cache.capacity)]

    def find_pass(self, requests: Sequence[DraftRequest]) -> DraftPass:
        count = round_up(max([request.block_size for request in requests]), self._blocks)
        width = self._width(max([request.num_candidates for request in requests]))
        context = context_bucket([self.cache.lengths[request.slot] for request in requests])
        return self._find_draft(round_up(len(requests), REQUESTS), count, context, width)

    def _width(self, num_candidates: int) -> int:
        return max(self._widths[0] if num_candidates == 1 else self._widths[-1], num_candidates)

    def write(self, draft: DraftPass, requests: Sequence[DraftRequest]) -> None:
        """Into the plan of a pass, which must not be in flight."""
        for request in requests:
            self.cache.append(request.slot, request.block_size)
        draft.plan.write_blocks(requests, self.cache.lengths, self.model.config.mask_token_id)

    def _find_draft(self, num_requests: int, count: int, context: int, width: int) -> DraftPass:
        key = (num_requests, count, context, width)
        if key not in self._drafts:
            self._drafts[key] = self._record_draft(num_requests, count, context, width)
        return self._drafts[key]

    @torch.inference_mode()
    def _record_draft(self, num_requests: int, count: int, context: int, width: int) -> DraftPass:
        plan = PassPlan(num_requests, count, context, self.device, self._spare_slot)
        offsets = torch.arange(count, dtype=torch.int32, device=self.device).repeat(num_requests)
        host = self._rank_blocks(plan, offsets, width).map(_host_copy)  # once, for the shapes
        recorded = DraftPass(plan, host.map(lambda part: part.numpy()))

        @torch.inference_mode()
        def run() -> None:
            plan.staging.send()
            recorded.draft = self._rank_blocks(plan, offsets, width)

        @torch.inference_mode()
        def fetch() -> None:
            for part, place in zip(recorded.draft.arrays, host.arrays, strict=True):
                if part is not None and place is not None:
                    self.fused.layers.kernels.send(part, place)

        recorded.run = capture(run, self.device, self._pool)
        recorded.fetch = capture(fetch, self.device, self._pool)
        return recorded

    def _rank_blocks(self, plan: PassPlan, offsets: Tensor, width: int) -> Draft[Tensor]:
        """The best tokens of all positions behind the anchors. Drafts never run at the same time, and share buffers."""
        states = self.fused.forward(cast(nn.Embedding, self.embed).weight, plan.inputs, offsets)
        states = states.view(plan.num_requests, plan.count, -1)[:, 1:]
        num_rows = states.shape[:2].numel()
        hidden = self._hidden[:num_rows].view_as(states).copy_(states)
        logits = self.fused.layers.whole(hidden.flatten(0, 1), self._head_weight, self._logits[:num_rows])
        noise, selector = plan.noise(0), self.model.candidate_selector
        width = min(width if selector is None else self.model.config.selector_top_k, logits.shape[-1])
        values, token_ids, log_probs = self.rank_tokens(logits.unflatten(0, states.shape[:2]), width, noise)
        if selector is None:
            return Draft(token_ids, log_probs)
        pairs = self._score_pairs(plan.tree_limits.anchors, values, token_ids, hidden, noise.temperatures)
        return Draft(token_ids, log_probs, *pairs)

    def rank_tokens(self, scores: Tensor, num_best: int, noise: Noise | None = None) -> tuple[Tensor, Tensor, Tensor]:
        found = self.fused.layers.kernels.rank_tokens(scores.flatten(0, 1), num_best, self.token_ids, noise)
        values, ids, log_probs = (part.unflatten(0, scores.shape[:2]) for part in found)
        return values, ids, log_probs

    def score_pairs(
        self, anchor_ids: Tensor, values: Tensor, ids: Tensor, hidden: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        temperatures = torch.full((len(ids),), 1 / scale, device=self.device)
        return self._score_pairs(anchor_ids, values, ids, hidden, temperatures)

    def _score_pairs(
        self, anchor_ids: Tensor, values: Tensor, ids: Tensor, hidden: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        selector, layers = cast(CandidateSelector, self.model.candidate_selector), self.fused.layers
        projected = layers.whole(hidden.flatten(0, 1), selector.hidden_projection.weight).unflatten(0, ids.shape[:2])
        books = Selector(selector.predecessor_codebook, selector.successor_codebook)
        return layers.kernels.score_pairs(values, ids, anchor_ids, projected, books, temperatures)

    def store(self, taps: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Committed tokens into the cache, on the device: those in `rows` of the taps, as many for each request."""
        self.fused.store_context(taps.index_select(0, rows), self.context_weight, positions, slots, starts)

    def _store_view(self, taps: Tensor, given: dict[str, Tensor]) -> None:
        self.store(taps, given["rows"], given["positions"], given["slots"], given["starts"])


def _host_copy(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
