"""Observing on a GPU: what a drafter keeps of committed tokens, one CUDA graph for each shape.

A graph reads the taps straight from the buffer where the target's recorded passes leave them. A drafter whose
observations lie elsewhere, or come from too many requests at once, observes unrecorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.cache.slots import SlotCache
from blockpilot.decoding.drafter import Observation, cut
from blockpilot.gpu.buckets import REQUESTS, largest_below, round_up
from blockpilot.gpu.device import capture, wait_for
from blockpilot.gpu.plan import Staging

# Stores what R requests of n tokens each have observed: the taps, and the arrays of `RecordedViews._find`.
Store = Callable[[Tensor, dict[str, Tensor]], None]


class RecordedViews:
    def __init__(self, cache: SlotCache, store: Store, *, buckets: Sequence[int], max_rows: int, pool: Any) -> None:
        """`buckets`: tokens of a request, rounded up; a slot has room for that many more. `max_rows`: of all."""
        self.cache, self.store, self.buckets, self.max_rows = cache, store, buckets, max_rows
        self.taps: Tensor | None = None  # the target's buffer
        self._spare_slot = len(cache.lengths)
        self._pool, self._device = pool, cache.rows.device
        self._offsets = np.arange(buckets[-1], dtype=np.int32)
        self._views: dict[tuple[int, int], tuple[Staging, Callable[[], None]]] = {}

    def prepare(self, num_requests: int) -> None:
        """Record all sizes for that many requests."""
        for count in self.buckets:
            if self.taps is not None and num_requests * count <= self.max_rows:
                self._find(self.taps, num_requests, count)

    def observe(self, observations: Sequence[Observation]) -> bool:
        """Whether it could. The cache then has, or gets as soon as the device is through, a row for every token."""
        taps = self.taps
        most = largest_below(self.max_rows // round_up(len(observations), REQUESTS), self.buckets)
        is_bound = all(one.taps is taps and one.rows is not None for one in observations)
        if taps is None or not is_bound or not most:
            return False
        for index, piece in enumerate(cut(observations, most)):
            if index:
                wait_for(self._device)  # the inputs of the piece before lie where this one's will
            self._observe_piece(piece, taps)
        return True

    def _observe_piece(self, observations: Sequence[Observation], taps: Tensor) -> None:
        num_requests = round_up(len(observations), REQUESTS)
        count = round_up(max([len(one.token_ids) for one in observations]), self.buckets)
        staging, run = self._find(taps, num_requests, count)
        num_extra = num_requests - len(observations)
        starts = [self.cache.extend(one.slot, len(one.token_ids)) for one in observations] + [0] * num_extra
        slots = [one.slot for one in observations] + [self._spare_slot] * num_extra
        rows: list[int] = []
        ids: list[int] = []
        last_rows: list[int] = []
        for one in observations:
            last_rows.append(len(ids) + len(one.token_ids) - 1)
            rounding = [0] * (count - len(one.token_ids))
            rows += one.rows or ()
            rows += rounding
            ids += one.token_ids
            ids += rounding
        rounding = [0] * (num_extra * count)
        staging.write([*rows, *rounding, *ids, *rounding])
        staging.write([*slots, *starts, *last_rows, *[0] * num_extra], 3 * num_requests * count)
        positions = staging.host["positions"].reshape(num_requests, count)
        np.add(np.array(starts, np.int32)[:, None], self._offsets[:count], out=positions)
        run()

    def _find(self, taps: Tensor, num_requests: int, count: int) -> tuple[Staging, Callable[[], None]]:
        key = (num_requests, count)
        if key not in self._views:
            each, all_of = num_requests, num_requests * count
            staging = Staging(
                self._device,
                rows=all_of,  # of the taps
                token_ids=all_of,
                positions=all_of,
                slots=each,
                starts=each,
                last_rows=each,  # each request's last token among all of them
            )
            staging.host["slots"][:] = self._spare_slot

            @torch.inference_mode()
            def run() -> None:
                staging.send()
                self.store(taps, staging.device)

            self._views[key] = staging, capture(run, self._device, self._pool)
        return self._views[key]
