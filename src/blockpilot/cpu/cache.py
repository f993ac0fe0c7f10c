"""Slots in the order in which compiled passes read them: half precision, keys 16 rows side by side.

`rows` [layers, 2, slots, kv heads, capacity, dim] has the shape of every cache; inside a head, keys lie as
[capacity / 16, dim, 16].
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.cache.slots import SlotCache
from blockpilot.core.device import Placement
from blockpilot.models.config import DecoderConfig
from blockpilot.native.library import CacheData, Kernels, ModelData

SIDE = 16  # rows of keys that lie side by side


class PackedCache(SlotCache):
    def __init__(self, layers: DecoderConfig, placement: Placement, kernels: Kernels, *, num_open: int) -> None:
        rounded = -(-(placement.context_length + num_open) // SIDE) * SIDE
        halves = replace(placement, dtype=torch.float16)
        super().__init__(layers, halves, num_open=rounded - placement.context_length)
        layer, plane, slot, head, _, _ = self.rows.stride()
        self.data = CacheData(self.rows.data_ptr(), layer, plane, slot, head)
        self._kernels = kernels
        self._shape = ModelData(num_layers=layers.num_layers, num_kv=layers.num_kv_heads, dim=layers.head_dim)

    def _gather(self, slot: int, start: int, path: Sequence[int]) -> None:
        self._kernels.move(self._shape, self.data, slot, start, path)

    def copy_rows(self, slot: int, start: int, end: int) -> Tensor:
        rows = self.rows[:, :, slot]  # [layers, 2, H, capacity, D]
        keys = rows[:, 0].unflatten(2, (-1, SIDE)).flatten(3).unflatten(3, (-1, SIDE)).transpose(3, 4).flatten(2, 3)
        return torch.stack((keys[:, :, start:end], rows[:, 1, :, start:end]), dim=1)
