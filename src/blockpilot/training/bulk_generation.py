"""Many answers at once: the target writes training data as fast as its memory can be read.

A fixed number of rows decodes in lockstep against one static cache, one token per row and step. Every `refill_every`
steps the host checks which rows have finished and puts new prompts in their place. On a GPU the step is a CUDA graph,
so that no launch overhead shows, and attention is one kernel that reads each row's own filled part
(`bulk_attention.py`).

This is not the serving engine: it trades latency for throughput and never speculates.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.gpu.device import graph_pool, has_triton, on_device
from blockpilot.models.decoder import Attend, Decoder
from blockpilot.training.dense_attention import PrefillAttention, StaticCacheAttention

_WINDOW_STEP = 64
_PREFILL_STEP = 16  # prompts are padded to a multiple of this
_MAX_PREFILL_ROWS = 256


@dataclass
class Row:
    """One text in the making."""

    prompt_ids: list[int]
    temperature: float
    max_length: int  # prompt and answer together
    answer_ids: list[int] = field(default_factory=list)


class BulkGenerator:
    def __init__(
        self,
        decoder: Decoder,
        *,
        num_rows: int,
        capacity: int,
        eos_token_ids: Iterable[int],
        seed: int,
        refill_every: int = 16,
    ) -> None:
        """`capacity` bounds the length of every text; `num_rows` of them are written side by side."""
        config = decoder.config
        weight = decoder.embed_tokens.weight
        self.decoder, self.device = decoder, weight.device
        self.capacity, self.refill_every = capacity, refill_every
        self.eos_token_ids = set(eos_token_ids)
        self._eos = torch.tensor(sorted(self.eos_token_ids), dtype=torch.int64, device=self.device)
        shape = (config.num_layers, 2, num_rows, config.num_kv_heads, capacity, config.head_dim)
        self.cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self.rows: list[Row | None] = [None] * num_rows
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.temperatures = torch.zeros(num_rows, device=self.device)
        self.history = torch.zeros(refill_every, num_rows, dtype=torch.int64, device=self.device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.device)  # all that the target has computed
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._steps: dict[int, Callable[[], None]] = {}
        self._has_kernel = self.device.type == "cuda" and has_triton()
        self._pool = graph_pool(self.device)

    @torch.inference_mode()
    def run(self, source: Iterator[Row]) -> Iterator[Row]:
        """Take texts from `source` as rows come free; yield each when its answer has ended."""
        yield from self._refill(source)
        while any(self.rows):
            step = self._step_function(self._window())
            for index in range(self.refill_every):
                step()
                self.history[index] = self.tokens
            yield from self._collect()
            yield from self._refill(source)

    def _window(self) -> int:
        """Cache rows that attention must look at in this round; the kernel finds out by itself."""
        if self._has_kernel:
            return self.capacity
        longest = int(self.positions.max())
        return min(self.capacity, -(-(longest + self.refill_every + 1) // _WINDOW_STEP) * _WINDOW_STEP)

    def _step(self, window: int) -> None:
        hidden, _ = self.decoder(self.tokens, self.positions, self._attention(window))
        logits = self.decoder.logits(hidden).float()
        self.tokens.copy_(self._sample(logits, self.temperatures))
        self.positions.add_(1).clamp_(max=self.capacity - 1)

    def _attention(self, window: int) -> Attend:
        """On a GPU one kernel that reads each row's own filled part; elsewhere a masked product over the window."""
        if not self._has_kernel:
            return StaticCacheAttention(self.cache, self.positions, window)
        from blockpilot.training.bulk_attention import BulkAttention

        return BulkAttention(self.cache, self.positions)

    def _sample(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        noise = torch.empty_like(logits).exponential_(generator=self.generator).log_()  # minus a Gumbel variable
        scores, tokens = (logits - temperatures[:, None] * noise).max(dim=-1)
        self.is_finite.logical_and_(scores.isfinite().all())
        return tokens

    def _step_function(self, window: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            return partial(self._step, window)
        if window not in self._steps:
            self._steps[window] = self._capture(window)
        return self._steps[window]

    def _capture(self, window: int) -> Callable[[], None]:
        """Record one step as a CUDA graph; the state it moved is put back."""
        state = self.tokens.clone(), self.positions.clone()
        with on_device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(window)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                self._step(window)
        self.tokens.copy_(state[0])
        self.positions.copy_(state[1])
        return graph.replay

    def _require_finite(self) -> None:
        if not bool(self.is_finite):
            raise BlockPilotError(
                "the target gives no finite scores: its weights are damaged, or numbers outgrow the dtype (try --dtype "
                "float32)"
            )

    def _collect(self) -> Iterator[Row]:
        self._require_finite()
        is_end = torch.isin(self.history, self._eos)
        first_end = torch.where(is_end.any(0), is_end.int().argmax(0) + 1, self.refill_every).tolist()
        history = self.history.t().tolist()
        for index, row in enumerate(self.rows):
            if row is not None:
                room = row.max_length - len(row.prompt_ids) - len(row.answer_ids)
                row.answer_ids += history[index][: min(first_end[index], room)]
                if self._is_finished(row):
                    self.rows[index] = None
                    yield row

    def _is_finished(self, row: Row) -> bool:
        is_full = len(row.prompt_ids) + len(row.answer_ids) >= row.max_length
        return is_full or row.answer_ids[-1] in self.eos_token_ids

    def _refill(self, source: Iterator[Row]) -> Iterator[Row]:
        """Give every empty row a new prompt; its first token comes out of the prefill and may already end it."""
        while empty := [index for index, row in enumerate(self.rows) if row is None]:
            prompts = sorted(itertools.islice(source, len(empty)), key=lambda row: len(row.prompt_ids))  # less padding
            taken = list(zip(empty, prompts, strict=False))
            for start in range(0, len(taken), _MAX_PREFILL_ROWS):
                self._prefill(taken[start : start + _MAX_PREFILL_ROWS])
            finished = [index for index, row in taken if self._is_finished(row)]
            for index, row in taken:
                self.rows[index] = None if index in finished else row
            yield from (row for index, row in taken if index in finished)
            if not finished:
                break
        idle = [index for index, row in enumerate(self.rows) if row is None]
        if idle:
            self.positions[torch.tensor(idle, device=self.device)] = 0

    def _prefill(self, taken: list[tuple[int, Row]]) -> None:
        for _, row in taken:
            if not 0 < len(row.prompt_ids) < row.max_length <= self.capacity:
                raise InputError(
                    f"a prompt of {len(row.prompt_ids)} tokens leaves no room for an answer within "
                    f"{min(row.max_length, self.capacity)}"
                )
        lengths = torch.tensor([len(row.prompt_ids) for _, row in taken], device=self.device)
        width = min(self.capacity, -(-int(lengths.max()) // _PREFILL_STEP) * _PREFILL_STEP)
        padded = torch.tensor([row.prompt_ids + [0] * (width - len(row.prompt_ids)) for _, row in taken])
        rows = torch.tensor([index for index, _ in taken], device=self.device)
        positions = torch.arange(width, device=self.device).repeat(len(taken))
        attend = PrefillAttention(self.cache, rows, width)
        hidden, _ = self.decoder(padded.flatten().to(self.device), positions, attend)
        last = hidden.view(len(taken), width, -1)[torch.arange(len(taken), device=self.device), lengths - 1]
        self.temperatures[rows] = torch.tensor([row.temperature for _, row in taken], device=self.device)
        first = self._sample(self.decoder.logits(last).float(), self.temperatures[rows])
        self._require_finite()
        self.tokens[rows], self.positions[rows] = first, lengths
        for (_, row), token_id in zip(taken, first.tolist(), strict=True):
            row.answer_ids.append(token_id)
