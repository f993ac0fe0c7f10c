"""The target on a GPU: every check has one of few shapes, and the pass of a shape is recorded once as a CUDA graph.

Prompts take the same passes, piece by piece, as chains. Long ones run unrecorded, as do checks of more rows than the
result buffers hold.
"""

from collections.abc import Callable
from collections.abc import Sequence as Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot.cache.slots import is_contiguous
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.target import PassResult, Show, TargetRunner, show_nobody
from blockpilot.gpu.buckets import (
    CHECK_TOKENS,
    MAX_CHECK_ROWS,
    MAX_LOGITS_BYTES,
    MAX_PIECES,
    REQUESTS,
    context_bucket,
    context_buckets,
    largest_below,
    round_up,
)
from blockpilot.gpu.device import capture, check_memory, graph_pool, wait_for
from blockpilot.gpu.fused import FusedDecoder
from blockpilot.gpu.plan import GREEDY, PassPlan, Staging
from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import Decoder

PATH_WIDTH = MAX_TREE_NODES + 1


@dataclass(eq=False)
class CheckPass:
    plan: PassPlan
    logits: Tensor  # [R * count, V]
    taps: Tensor | None  # of all rows that a pass may have
    run: Callable[[], None] = field(init=False)
    best: Tensor = field(init=False)  # [R * count] the target's token after each
    hidden: Tensor | None = None  # [R * count, H], before the final norm


class GpuTargetRunner(TargetRunner):
    buckets = CHECK_TOKENS
    num_spare = 1

    def __init__(self, decoder: Decoder, placement: Placement) -> None:
        config, device, dtype = decoder.config, placement.device, placement.dtype
        self.max_rows = _max_rows(config, placement)
        check_memory(device, _bytes_needed(config, placement, self.max_rows), "the target's cache and results")
        super().__init__(decoder, placement)
        self.fused = FusedDecoder(decoder, self.cache.rows)
        self._spare_slot = placement.num_slots
        self._pool = graph_pool(device)
        self._logits = torch.empty(self.max_rows, config.vocab_size, dtype=dtype, device=device)
        self._taps: dict[tuple[int, ...], Tensor] = {}  # by the layers that are read
        self._best = torch.empty(self.max_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._best_ids = self._best.numpy()
        self._passes: dict[tuple[int, int, int, tuple[int, ...]], CheckPass] = {}
        self._moves: dict[int, tuple[Staging, Callable[[], None]]] = {}

    def prepare(self, num_requests: int, tap_layers: Collection[int]) -> None:
        """Record the checks of all sizes, for short contexts and, where slots are long, for long ones."""
        rounded = round_up(num_requests, REQUESTS)
        for count in CHECK_TOKENS:
            if rounded * count <= self.max_rows:
                self.find_passes(num_requests, count, tap_layers)
        self._move(rounded)

    def taps(self, tap_layers: Collection[int]) -> Tensor:
        """The buffer [rows, layers * H] where passes that read these layers leave them; it stays the same."""
        layers = tuple(tap_layers)
        if layers not in self._taps:
            shape = (self.max_rows, len(layers) * self.decoder.config.hidden_size)
            self._taps[layers] = torch.empty(shape, dtype=self._logits.dtype, device=self.device)
        return self._taps[layers]

    def prefill(
        self,
        chunks: Collection[tuple[int, list[int]]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
        show: Show = show_nobody,
    ) -> PassResult:
        size, longest = self._piece_size(len(chunks)), max(len(ids) for _, ids in chunks)
        if longest > size * MAX_PIECES:
            return super().prefill(chunks, tap_layers, params, show)
        best = [0] * len(chunks)
        ended: list[int] = []  # chunks, and of their last tokens
        last: list[tuple[Tensor, Tensor]] = []  # logits and hidden states
        for start in range(0, longest, size):
            rest = [
                (row, slot, ids[start : start + size]) for row, (slot, ids) in enumerate(chunks) if len(ids) > start
            ]
            trees = [(slot, DraftTree.chain(ids[0], ids[1:])) for _, slot, ids in rest]
            check = self._check(trees, tap_layers, [params[row] for row, _, _ in rest] if params else ())
            observations, ends = [], []
            for place, (row, slot, ids) in enumerate(rest):
                self.cache.keep(slot, range(len(ids)))
                begin = place * check.plan.count
                end = begin + len(ids)
                observations.append(Observation(slot, ids, check.taps, range(begin, end)))
                if start + len(ids) == len(chunks[row][1]):
                    ended.append(row)
                    ends.append(end - 1)
                    best[row] = int(self._best_ids[end - 1])
            show(observations)
            if ends:
                assert check.hidden is not None
                rows = torch.tensor(ends, device=self.device)
                last.append((check.logits[rows], check.hidden[rows]))
        logits, hidden = (torch.cat(parts) for parts in zip(*last, strict=True))
        order = torch.tensor(ended, device=self.device).argsort()
        return PassResult(logits[order], None, range(len(chunks)), hidden[order], best)

    def _piece_size(self, num_requests: int) -> int:
        """Tokens of each prompt that one pass reads."""
        return min(MAX_TREE_NODES, largest_below(self.max_rows // round_up(num_requests, REQUESTS), CHECK_TOKENS))

    def verify(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
    ) -> PassResult:
        if not self.can_run(len(trees), max([len(tree) for _, tree in trees])):
            return super().verify(trees, tap_layers, params)
        check = self._check(trees, tap_layers, params)
        num_rows = len(trees) * check.plan.count
        best = self._best_ids[:num_rows].tolist()
        return PassResult(check.logits, check.taps, range(0, num_rows, check.plan.count), best=best)

    def _check(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams],
    ) -> CheckPass:
        """Run a pass and wait for it. Its results are valid until the next pass."""
        check = self.find_pass([slot for slot, _ in trees], max([len(tree) for _, tree in trees]), tap_layers)
        for slot, tree in trees:
            self.cache.append(slot, len(tree))
        words = [GREEDY if one.is_filtered else one.words for one in params] or [GREEDY] * len(trees)
        check.plan.write_trees(trees, self.cache.lengths, words)
        check.run()
        wait_for(self.device)
        return check

    def can_run(self, num_requests: int, num_tokens: int) -> bool:
        return round_up(num_requests, REQUESTS) * round_up(num_tokens, CHECK_TOKENS) <= self.max_rows

    def find_pass(self, slots: Collection[int], num_tokens: int, tap_layers: Collection[int]) -> CheckPass:
        """The pass for that many tokens of each request, or more."""
        context = context_bucket([self.cache.lengths[slot] for slot in slots])
        return self._pass(
            round_up(len(slots), REQUESTS), round_up(num_tokens, CHECK_TOKENS), context, tuple(tap_layers)
        )

    def find_passes(self, num_requests: int, num_tokens: int, tap_layers: Collection[int]) -> list[CheckPass]:
        """Those for short contexts and, where slots are long, for long ones."""
        shape = round_up(num_requests, REQUESTS), round_up(num_tokens, CHECK_TOKENS)
        return [self._pass(*shape, context, tuple(tap_layers)) for context in context_buckets(self.cache.capacity)]

    def keep(self, paths: Collection[tuple[int, Collection[int]]]) -> None:
        moved = [(slot, path) for slot, path in paths if not is_contiguous(path)]
        if moved:
            num_requests = round_up(len(moved), REQUESTS)
            num_extra = num_requests - len(moved)
            staging, run = self._move(num_requests)
            slots = [slot for slot, _ in moved] + [self._spare_slot] * num_extra
            starts = [self.cache.lengths[slot] for slot, _ in moved] + [0] * num_extra
            counts = [len(path) for _, path in moved] + [0] * num_extra
            staging.write([*slots, *starts, *counts])
            for row, (_, path) in enumerate(moved):
                staging.write(path, 3 * num_requests + row * PATH_WIDTH)
            run()
        for slot, path in paths:
            self.cache.keep(slot, path, is_moved=True)

    def _pass(self, num_requests: int, count: int, context: int, tap_layers: tuple[int, ...]) -> CheckPass:
        key = (num_requests, count, context, tap_layers)
        if key not in self._passes:
            plan = PassPlan(num_requests, count, context, self.device, self._spare_slot)
            taps = self.taps(tap_layers) if tap_layers else None
            check = CheckPass(plan, self._logits[: num_requests * count], taps)
            check.run = capture(lambda: self._run(check, tap_layers), self.device, self._pool)
            self._passes[key] = check
        return self._passes[key]

    @torch.inference_mode()
    def _run(self, check: CheckPass, tap_layers: tuple[int, ...]) -> None:
        plan, num_rows = check.plan, len(check.logits)
        plan.staging.send()
        taps = None if check.taps is None else check.taps[:num_rows]
        check.hidden, normed = self.fused.forward(plan.inputs, tap_layers, taps)
        logits = self.fused.logits(normed, out=check.logits)
        check.best = self.fused.layers.kernels.rank_tokens(logits, 1, noise=plan.noise(1))[1].flatten()
        self.fused.layers.kernels.send(check.best, self._best[:num_rows])

    def _move(self, num_requests: int) -> tuple[Staging, Callable[[], None]]:
        if num_requests not in self._moves:
            sizes = dict.fromkeys(("slots", "starts", "counts"), num_requests)
            staging = Staging(self.device, **sizes, paths=num_requests * PATH_WIDTH)
            staging.host["slots"][:] = self._spare_slot
            given = staging.device
            paths = given["paths"].view(-1, PATH_WIDTH)

            @torch.inference_mode()
            def run() -> None:
                staging.send()
                self.fused.layers.kernels.move_rows(
                    self.cache.rows, given["slots"], given["starts"], paths, given["counts"]
                )

            self._moves[num_requests] = staging, capture(run, self.device, self._pool)
        return self._moves[num_requests]


def _max_rows(config: DecoderConfig, placement: Placement) -> int:
    most = min(MAX_CHECK_ROWS, MAX_LOGITS_BYTES // (config.vocab_size * placement.dtype.itemsize))
    return min(most, round_up(placement.num_slots, REQUESTS) * CHECK_TOKENS[-1])


def _bytes_needed(config: DecoderConfig, placement: Placement, max_rows: int) -> int:
    num_slots, context_length, dtype = placement.num_slots, placement.context_length, placement.dtype
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    cache = (num_slots + 1) * (context_length + MAX_TREE_NODES) * row
    sizes = [size * count for size in REQUESTS if size <= round_up(num_slots, REQUESTS) for count in CHECK_TOKENS]
    kept = len(context_buckets(context_length)) * sum(rows for rows in sizes if rows <= max_rows)  # of every pass
    num_hidden = 8 if config.moe is None else 8 + config.moe.num_active * 4 // dtype.itemsize  # experts leave float32
    results = max_rows * (config.vocab_size + num_hidden * config.hidden_size) + kept * config.hidden_size
    return (cache + results) * dtype.itemsize
