"""The target on a GPU: every check has one of few shapes, and the pass of a shape is recorded once as a CUDA graph.

Prompts are read piece by piece, in passes that need no masks and leave the logits of each prompt's last token. A
token's logits are the same bits in every pass (docs/exactness.md).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blockpilot.cache.slots import is_contiguous
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.sampling import NO_TOKEN
from blockpilot.decoding.target import PassResult, Show, TargetRunner, show_nobody
from blockpilot.gpu.buckets import (
    CHECK_TOKENS,
    CONTEXTS,
    MAX_CHECK_ROWS,
    MAX_LOGITS_BYTES,
    MAX_PROMPT_ROWS,
    PROMPT_TOKENS,
    REQUESTS,
    context_bucket,
    context_buckets,
    largest_below,
    round_up,
    with_shapes,
)
from blockpilot.gpu.device import capture, check_memory, graph_pool, wait_for
from blockpilot.gpu.fused import FusedDecoder
from blockpilot.gpu.interface import Kernels, Noise
from blockpilot.gpu.plan import GREEDY, PassPlan, Staging, Words
from blockpilot.gpu.schedule import CHUNK, GROUP_CHUNKS, MAX_PART_BYTES, MIN_BRANCHING, part_bytes
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


@dataclass(eq=False)
class PromptPass:
    plan: PassPlan
    logits: Tensor  # [R, V] of each prompt's last token
    taps: Tensor | None  # of all rows that a pass may have
    run: Callable[[], None] = field(init=False)
    hidden: Tensor = field(init=False)  # [R, H], before the final norm


class GpuTargetRunner(TargetRunner):
    buckets: tuple[int, ...] = CHECK_TOKENS
    num_spare = 1

    def __init__(self, decoder: Decoder, placement: Placement) -> None:
        config, device, dtype = decoder.config, placement.device, placement.dtype
        self.buckets = with_shapes(CHECK_TOKENS, placement.own_shapes)
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
        self._passes: dict[tuple[int, int, int, tuple[int, ...], bool], CheckPass] = {}
        self._prompts: dict[tuple[int, int, tuple[int, ...]], PromptPass] = {}
        self._moves: dict[int, tuple[Staging, Callable[[], None]]] = {}
        self._is_recording = True

    @property
    def is_exact(self) -> bool:  # type: ignore[override]
        """The reference promises no bits."""
        return self.device.type == "cuda"

    def prepare(self, num_requests: int, tap_layers: Collection[int], *, can_branch: bool) -> None:
        """Record the checks of all sizes, for short contexts and, where slots are long, for long ones; and prompts."""
        rounded = round_up(num_requests, REQUESTS)
        for count in self.buckets:
            if rounded * count <= self.max_rows:
                self.find_passes(num_requests, count, tap_layers, can_branch=can_branch)
        for count in PROMPT_TOKENS:
            if rounded * count <= MAX_PROMPT_ROWS and count <= self.cache.capacity:
                self._prompt_pass(rounded, count, tuple(tap_layers))
        self._move(rounded)

    def taps(self, tap_layers: Collection[int]) -> Tensor:
        """The buffer [rows, layers * H] where passes that read these layers leave them; it stays the same."""
        layers = tuple(tap_layers)
        if layers not in self._taps:
            shape = (max(self.max_rows, MAX_PROMPT_ROWS), len(layers) * self.decoder.config.hidden_size)
            self._taps[layers] = torch.empty(shape, dtype=self._logits.dtype, device=self.device)
        return self._taps[layers]

    def prefill(
        self,
        chunks: Collection[tuple[int, list[int]]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
        show: Show = show_nobody,
    ) -> PassResult:
        """Piece by piece: how prompts are cut changes nothing."""
        num_requests, config = len(chunks), self.decoder.config
        size = largest_below(MAX_PROMPT_ROWS // round_up(num_requests, REQUESTS), PROMPT_TOKENS)
        best = [0] * num_requests
        logits = torch.empty(num_requests, config.vocab_size, dtype=self._logits.dtype, device=self.device)
        hidden = torch.empty(num_requests, config.hidden_size, dtype=self._logits.dtype, device=self.device)
        for start in range(0, max(len(ids) for _, ids in chunks), size):
            rest = [
                (row, slot, ids[start : start + size]) for row, (slot, ids) in enumerate(chunks) if len(ids) > start
            ]
            words = _words([params[row] for row, _, _ in rest] if params else (), len(rest))
            piece = self._read([(slot, ids) for _, slot, ids in rest], tap_layers, words)
            observations, ended = [], []  # places and rows of chunks that end here
            for place, (row, slot, ids) in enumerate(rest):
                self.cache.keep(slot, range(len(ids)))
                begin = place * piece.plan.count
                observations.append(Observation(slot, ids, piece.taps, range(begin, begin + len(ids))))
                if start + len(ids) == len(chunks[row][1]):
                    ended.append((place, row))
                    best[row] = int(self._best_ids[place])
            show(observations)
            if ended:
                places, rows = torch.tensor(ended, device=self.device).T
                logits[rows], hidden[rows] = piece.logits[places], piece.hidden[places]
        is_finite = logits.amax(dim=-1).isfinite().tolist()
        best = [token if is_number else NO_TOKEN for token, is_number in zip(best, is_finite, strict=True)]
        return PassResult(logits, None, range(num_requests), hidden, best)

    def _read(
        self, pieces: Collection[tuple[int, list[int]]], tap_layers: Collection[int], words: Collection[Words]
    ) -> PromptPass:
        """Run a pass over one piece of each prompt and wait for it. Its results are valid until the next pass."""
        longest = max(len(ids) for _, ids in pieces)
        shape = round_up(len(pieces), REQUESTS), round_up(longest, PROMPT_TOKENS)
        found = self._prompt_pass(*shape, tuple(tap_layers))
        for slot, ids in pieces:
            self.cache.append(slot, len(ids))
        found.plan.write_prompts(pieces, self.cache.lengths, words)
        found.run()
        wait_for(self.device)
        return found

    def verify(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
    ) -> PassResult:
        """More rows than the result buffers hold are checked in several passes."""
        words = _words(params, len(trees))
        largest = max([len(tree) for _, tree in trees])
        if self.can_run(len(trees), largest):
            check = self._check(trees, tap_layers, words, num_tokens=largest)
            num_rows = len(trees) * check.plan.count
            best = self._best_ids[:num_rows].tolist()
            return PassResult(check.logits, check.taps, range(0, num_rows, check.plan.count), best=best)
        most = largest_below(self.max_rows // round_up(largest, self.buckets), REQUESTS)
        logits, taps, best = [], [], []
        for start in range(0, len(trees), most):
            part = slice(start, start + most)
            check = self._check(trees[part], tap_layers, words[part], num_tokens=largest)
            num_rows = len(trees[part]) * check.plan.count
            logits.append(check.logits[:num_rows].clone())
            taps += [] if check.taps is None else [check.taps[:num_rows].clone()]
            best += self._best_ids[:num_rows].tolist()
        starts = range(0, len(best), len(best) // len(trees))
        return PassResult(torch.cat(logits), torch.cat(taps) if taps else None, starts, best=best)

    def _check(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        words: Collection[Words],
        *,
        num_tokens: int,
    ) -> CheckPass:
        """Run a pass and wait for it. Its results are valid until the next pass."""
        can_branch = not all(tree.is_chain for _, tree in trees)
        check = self.find_pass([slot for slot, _ in trees], num_tokens, tap_layers, can_branch=can_branch)
        for slot, tree in trees:
            self.cache.append(slot, len(tree))
        check.plan.write_trees(trees, self.cache.lengths, words)
        check.run()
        wait_for(self.device)
        return check

    def can_run(self, num_requests: int, num_tokens: int) -> bool:
        return round_up(num_requests, REQUESTS) * round_up(num_tokens, self.buckets) <= self.max_rows

    def longest_piece(self, num_requests: int) -> int:
        return largest_below(self.max_rows // round_up(num_requests, REQUESTS), PROMPT_TOKENS)

    def find_pass(
        self, slots: Collection[int], num_tokens: int, tap_layers: Collection[int], *, can_branch: bool
    ) -> CheckPass:
        """The pass for that many tokens of each request, or more; for chains alone unless a tree `can_branch`."""
        context = context_bucket([self.cache.lengths[slot] for slot in slots])
        shape = round_up(len(slots), REQUESTS), round_up(num_tokens, self.buckets)
        return self._pass(*shape, context, tuple(tap_layers), can_branch)

    def find_passes(
        self, num_requests: int, num_tokens: int, tap_layers: Collection[int], *, can_branch: bool
    ) -> list[CheckPass]:
        """Those for short contexts and, where slots are long, for long ones."""
        shape = round_up(num_requests, REQUESTS), round_up(num_tokens, self.buckets)
        contexts = context_buckets(self.cache.capacity)
        return [self._pass(*shape, context, tuple(tap_layers), can_branch) for context in contexts]

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

    def _pass(
        self, num_requests: int, count: int, context: int, tap_layers: tuple[int, ...], can_branch: bool
    ) -> CheckPass:
        can_branch = can_branch and count >= MIN_BRANCHING
        key = (num_requests, count, context, tap_layers, can_branch)
        if key not in self._passes:
            plan = PassPlan(num_requests, count, context, self.device, self._spare_slot, can_branch=can_branch)
            taps = self.taps(tap_layers) if tap_layers else None
            check = CheckPass(plan, self._logits[: num_requests * count], taps)
            check.run = self._record(lambda: self._run(check, tap_layers))
            self._passes[key] = check
        return self._passes[key]

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        return capture(run, self.device, self._pool) if self._is_recording else run

    @contextmanager
    def unrecorded(self, kernels: Kernels) -> Iterator[None]:
        """Meanwhile passes run kernel by kernel, with these kernels."""
        kept = self._passes, self._prompts, self.fused.layers.kernels
        self._passes, self._prompts, self.fused.layers.kernels = {}, {}, kernels
        self._is_recording = False
        try:
            yield
        finally:
            self._passes, self._prompts, self.fused.layers.kernels = kept
            self._is_recording = True

    @torch.inference_mode()
    def _run(self, check: CheckPass, tap_layers: tuple[int, ...]) -> None:
        plan, num_rows = check.plan, len(check.logits)
        plan.staging.send()
        taps = None if check.taps is None else check.taps[:num_rows]
        _, normed = self.fused.forward(plan.inputs, tap_layers, taps)
        check.best = self._rank(normed, check.logits, plan.noise(1))

    def _rank(self, normed: Tensor, logits: Tensor, noise: Noise) -> Tensor:
        """Logits of these states, and their tokens, which the host gets too."""
        kernels = self.fused.layers.kernels
        self.fused.logits(normed, out=logits)
        best = kernels.rank_tokens(logits, 1, noise=noise, is_weighed=False)[1].flatten()
        kernels.send(best, self._best[: len(best)])
        return best

    def _prompt_pass(self, num_requests: int, count: int, tap_layers: tuple[int, ...]) -> PromptPass:
        """One for all lengths of contexts: there are programs enough without sharing them out."""
        key = (num_requests, count, tap_layers)
        if key not in self._prompts:
            plan = PassPlan(num_requests, count, CONTEXTS[-1], self.device, self._spare_slot, is_prompt=True)
            taps = self.taps(tap_layers) if tap_layers else None
            found = PromptPass(plan, self._logits[:num_requests], taps)
            found.run = self._record(lambda: self._run_prompts(found, tap_layers))
            self._prompts[key] = found
        return self._prompts[key]

    @torch.inference_mode()
    def _run_prompts(self, found: PromptPass, tap_layers: tuple[int, ...]) -> None:
        plan = found.plan
        plan.staging.send()
        taps = None if found.taps is None else found.taps[: plan.num_requests * plan.count]
        hidden, normed = self.fused.forward(plan.inputs, tap_layers, taps)
        found.hidden, last = hidden.index_select(0, plan.last_rows), normed.index_select(0, plan.last_rows)
        noise = replace(plan.noise(1), positions=plan.inputs.positions.index_select(0, plan.last_rows))
        self._rank(last, found.logits, noise)

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


def _words(params: Collection[SamplingParams], num_requests: int) -> Collection[Words]:
    """How each request samples inside of a pass; what is filtered is chosen outside."""
    return [GREEDY if one.is_filtered or one.is_adjusted else one.words for one in params] or [GREEDY] * num_requests


def _max_rows(config: DecoderConfig, placement: Placement) -> int:
    most = min(MAX_CHECK_ROWS, MAX_LOGITS_BYTES // (config.vocab_size * placement.dtype.itemsize))
    num_requests = round_up(placement.num_slots, REQUESTS)
    return max(num_requests, min(most, num_requests * CHECK_TOKENS[-1]))


def _bytes_needed(config: DecoderConfig, placement: Placement, max_rows: int) -> int:
    num_slots, context_length, dtype = placement.num_slots, placement.context_length, placement.dtype
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    cache = (num_slots + 1) * (context_length + MAX_TREE_NODES) * row
    counts = with_shapes(CHECK_TOKENS, placement.own_shapes)
    sizes = [size * count for size in REQUESTS if size <= round_up(num_slots, REQUESTS) for count in counts]
    kept = len(context_buckets(context_length)) * sum(rows for rows in sizes if rows <= max_rows)  # of every pass
    num_hidden = 8 if config.moe is None else 8 + config.moe.num_active * 4 // dtype.itemsize  # experts leave float32
    hidden = max(max_rows, MAX_PROMPT_ROWS) * num_hidden * config.hidden_size
    results = max_rows * config.vocab_size + hidden + kept * config.hidden_size
    num_parts = -(-context_length // (CHUNK * GROUP_CHUNKS))
    parts = min(MAX_PART_BYTES, num_parts * part_bytes(max_rows * config.num_heads, config.head_dim))
    return (cache + results) * dtype.itemsize + parts
