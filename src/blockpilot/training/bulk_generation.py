"""Many answers at once: the target writes training data as fast as its memory can be read.

A fixed number of rows decodes in lockstep against one static cache, one token per row and step. Every `refill_every`
steps the host looks: finished rows leave and new prompts take their place. On a GPU the step is a CUDA graph, captured
once per attention window, so that no launch overhead shows. Attention reads only up to the longest live row.

This is not the serving engine: it trades latency for throughput and never speculates.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot.models.decoder import Decoder
from blockpilot.training.dense_attention import PrefillAttention, StaticCacheAttention

WINDOW_STEP = 64


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
        config = decoder.config
        weight = decoder.embed_tokens.weight
        self.decoder, self.device = decoder, weight.device
        self.capacity, self.refill_every = capacity, refill_every
        self.eos_token_ids = set(eos_token_ids)
        shape = (config.num_layers, 2, num_rows, config.num_kv_heads, capacity, config.head_dim)
        self.cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self.rows: list[Row | None] = [None] * num_rows
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.temperatures = torch.zeros(num_rows, device=self.device)
        self.history = torch.zeros(refill_every, num_rows, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._steps: dict[int, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @torch.inference_mode()
    def run(self, source: Iterator[Row]) -> Iterator[Row]:
        """Take texts from `source` as rows come free; yield each when its answer has ended."""
        self._refill(source)
        while any(self.rows):
            longest = int(self.positions.max())
            window = min(self.capacity, -(-(longest + self.refill_every + 1) // WINDOW_STEP) * WINDOW_STEP)
            step = self._step_function(window)
            for index in range(self.refill_every):
                step()
                self.history[index] = self.tokens
            yield from self._collect()
            self._refill(source)

    def _step(self, window: int) -> None:
        attend = StaticCacheAttention(self.cache, self.positions, window)
        hidden, _ = self.decoder(self.tokens, self.positions, attend)
        logits = self.decoder.logits(hidden).float()
        noise = torch.empty_like(logits).exponential_(generator=self.generator).log_()  # minus a Gumbel variable
        self.tokens.copy_((logits - self.temperatures[:, None] * noise).argmax(dim=-1))
        self.positions.add_(1).clamp_(max=self.capacity - 1)

    def _step_function(self, window: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self._step(window)
        if window not in self._steps:
            self._steps[window] = self._capture(window)
        return self._steps[window]

    def _capture(self, window: int) -> Callable[[], None]:
        state = self.tokens.clone(), self.positions.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(window)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(window)
        self.tokens.copy_(state[0])
        self.positions.copy_(state[1])
        return graph.replay

    def _collect(self) -> Iterator[Row]:
        history = self.history.t().tolist()  # the one wait per round
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            for token_id in history[index]:
                row.answer_ids.append(token_id)
                if token_id in self.eos_token_ids or len(row.prompt_ids) + len(row.answer_ids) >= row.max_length:
                    self.rows[index] = None
                    yield row
                    break

    def _refill(self, source: Iterator[Row]) -> None:
        """Give every empty row a new prompt; its first token comes out of the prefill."""
        empty = [index for index, row in enumerate(self.rows) if row is None]
        taken = [(index, row) for index, row in zip(empty, source, strict=False)]
        for start in range(0, len(taken), 256):
            self._prefill(taken[start : start + 256])
        idle = [index for index, row in enumerate(self.rows) if row is None]
        if idle:
            self.positions[torch.tensor(idle, device=self.device)] = 0

    def _prefill(self, taken: list[tuple[int, Row]]) -> None:
        lengths = torch.tensor([len(row.prompt_ids) for _, row in taken], device=self.device)
        width = -(-int(lengths.max()) // 16) * 16
        padded = torch.tensor([row.prompt_ids + [0] * (width - len(row.prompt_ids)) for _, row in taken])
        rows = torch.tensor([index for index, _ in taken], device=self.device)
        positions = torch.arange(width, device=self.device).repeat(len(taken))
        attend = PrefillAttention(self.cache, rows, width)
        hidden, _ = self.decoder(padded.flatten().to(self.device), positions, attend)
        last = hidden.view(len(taken), width, -1)[torch.arange(len(taken), device=self.device), lengths - 1]
        self._start_rows(taken, rows, lengths, self.decoder.logits(last).float())

    def _start_rows(self, taken: list[tuple[int, Row]], rows: Tensor, lengths: Tensor, logits: Tensor) -> None:
        temperatures = torch.tensor([row.temperature for _, row in taken], device=self.device)
        noise = torch.empty_like(logits).exponential_(generator=self.generator).log_()
        first = (logits - temperatures[:, None] * noise).argmax(dim=-1)
        self.tokens[rows], self.positions[rows], self.temperatures[rows] = first, lengths, temperatures
        for (index, row), token_id in zip(taken, first.tolist(), strict=True):
            row.answer_ids.append(token_id)
            self.rows[index] = row
