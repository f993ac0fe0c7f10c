"""The target on a CPU in 8-bit integers: a prompt's pieces, or the trees of a check, in one compiled call.

A token's logits are the same bits in every pass: sums of products are integers, float32 sums have one order, and a
query reads its keys in the order of positions (docs/exactness.md).
"""

import ctypes
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Collection
from contextlib import contextmanager
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.cpu.cache import PackedCache
from blockpilot.cpu.layers import PackedLayers, weight_of
from blockpilot.cpu.tokens import Tokens
from blockpilot.decoding.drafter import Observation
from blockpilot.decoding.target import PassResult, Show, TargetRunner, show_nobody
from blockpilot.models.decoder import Decoder, DecoderLayer
from blockpilot.models.packing import require_kernels, require_packable
from blockpilot.native.library import WantedData, address


class CpuTargetRunner(TargetRunner):
    is_exact = True
    cache: PackedCache

    def __init__(self, decoder: Decoder, placement: Placement) -> None:
        require_packable(decoder.config, "the target")
        self.kernels = require_kernels()
        super().__init__(decoder, placement)
        layers, norm = [cast(DecoderLayer, layer) for layer in decoder.layers], decoder.norm
        self.layers = PackedLayers(layers, norm, decoder.rotary, decoder.config, self.cache.capacity)
        self._head, self._space = ctypes.pointer(weight_of(decoder.lm_head)), self.kernels.open_space()
        self._embedding = decoder.embed_tokens.weight.data_ptr()
        self._no_logits, self._taps = torch.empty(0, decoder.config.vocab_size), torch.empty(0, 0)
        self._views: dict[int, Tensor] = {}  # of the taps, by the number of tokens
        self._records: list[Tensor] | None = None

    def _make_cache(self, placement: Placement) -> SlotCache:
        return PackedCache(self.decoder.config, placement, self.kernels, num_open=MAX_TREE_NODES)

    def prefill(
        self,
        chunks: Collection[tuple[int, list[int]]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
        show: Show = show_nobody,
    ) -> PassResult:
        tokens, ends = Tokens(), list(accumulate(len(ids) for _, ids in chunks))
        for slot, ids in chunks:
            tokens.add_chain(slot, self.cache.append(slot, len(ids)), ids)
        result = self._run(tokens, tap_layers, params, rows=[end - 1 for end in ends], has_logits=True)
        observations = []
        for (slot, ids), end in zip(chunks, ends, strict=True):
            self.cache.keep(slot, range(len(ids)))
            own = None if result.taps is None else result.taps[end - len(ids) : end]
            observations.append(Observation(slot, ids, own))
        show(observations)
        return result._replace(taps=None)

    def verify(
        self,
        trees: Collection[tuple[int, DraftTree]],
        tap_layers: Collection[int],
        params: Collection[SamplingParams] = (),
    ) -> PassResult:
        """Logits come with the result where nobody has said how tokens are chosen, or where some may not be."""
        tokens, starts = Tokens(), []
        for slot, tree in trees:
            starts.append(len(tokens))
            tokens.add_tree(slot, self.cache.append(slot, len(tree)), tree)
        has_logits = not params or any(one.needs_logits for one in params)
        if len(trees) < len(tokens):
            params = [one for one, (_, tree) in zip(params, trees, strict=False) for _ in tree.token_ids]
        return self._run(tokens, tap_layers, params, has_logits=has_logits)._replace(row_starts=starts)

    def read(
        self, token_ids: Collection[int], tap_layers: Collection[int], params: SamplingParams, *, first: int
    ) -> PassResult:
        """A whole text in a slot of its own: taps of all tokens; logits, hidden states and tokens from `first` on."""
        slot, tokens = self.cache.reserve(), Tokens()
        try:
            tokens.add_chain(slot, self.cache.append(slot, len(token_ids)), token_ids)
            rows = list(range(first, len(token_ids)))
            return self._run(tokens, tap_layers, [params] * len(rows), rows=rows, has_logits=True)
        finally:
            self.cache.free(slot)

    def _run(
        self,
        tokens: Tokens,
        tap_layers: Collection[int],
        params: Collection[SamplingParams],
        *,
        rows: list[int] | None = None,
        has_logits: bool,
    ) -> PassResult:
        """`rows` are those whose logits, or tokens, are asked for, with a request's `params` each. None: all."""
        config, count = self.decoder.config, len(tokens) if rows is None else len(rows)
        if self._records is not None:
            tap_layers = range(config.num_layers)
        places = [-1] * config.num_layers
        for place, layer in enumerate(tap_layers):
            places[layer] = place
        following = [tokens.positions[row] + 1 for row in (range(count) if rows is None else rows)]
        group = config.num_heads // config.num_kv_heads
        batch, columns = tokens.describe(self._embedding, group, places, following, rows or ())
        *_, tap_places, followers, wanted_rows = columns.addresses
        taps = self._room_for(len(tokens), len(tap_layers) * config.hidden_size) if tap_layers else None
        if taps is not None:
            batch.tap_places, batch.taps, batch.num_taps = tap_places, taps.data_ptr(), len(tap_layers)
        best = array("i", bytes(4 * count))
        wanted = WantedData(count, None if rows is None else wanted_rows, self._head)
        wanted.places, (wanted.best, _) = followers, best.buffer_info()
        kept = add_sampling(wanted, params)
        logits = torch.empty(count, config.vocab_size) if has_logits else self._no_logits
        hidden: Tensor | None = None
        if has_logits:
            wanted.logits = logits.data_ptr()
        if rows is not None:
            hidden = torch.empty(count, config.hidden_size)
            wanted.hidden = hidden.data_ptr()
        self.kernels.forward(self._space, self.layers.data, self.cache.data, batch, wanted)
        del kept
        if self._records is not None and taps is not None:
            self._records.append(taps.unflatten(1, (config.num_layers, -1)).clone())
        return PassResult(logits, taps, range(count), hidden, best.tolist())

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Meanwhile passes note the outputs [tokens, layers, hidden] of all layers."""
        self._records = []
        try:
            yield self._records
        finally:
            self._records = None

    def _room_for(self, count: int, width: int) -> Tensor:
        """For taps [count, width], until the next pass: drafters read them at once."""
        if self._taps.shape[1] != width or len(self._taps) < count:
            self._taps, self._views = torch.empty(max(count, MAX_TREE_NODES + 1), width), {}
        if count not in self._views:  # slicing takes longer than all else that the host does here
            self._views[count] = self._taps[:count]
        return self._views[count]


def add_sampling(wanted: WantedData, params: Collection[SamplingParams]) -> object:
    """Temperature and seed of each row, unless all are greedy. What is returned must live as long as the pass."""
    if all(one.is_greedy for one in params):
        return None
    temperatures = np.array([one.temperature for one in params], np.float32)
    seeds = np.array([one.seed for one in params], np.uint64)
    wanted.temperatures, wanted.seeds = address(temperatures), address(seeds)
    return temperatures, seeds
