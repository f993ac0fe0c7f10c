"""Block-quantized weights kept as they are stored: one byte per weight, a scale and an offset per 32 of them.

Loading a GGUF file attaches these codes to its linear layers; `pack_linears` decides whether they are used. They hold
exactly the dequantized weights (w = scale * code + offset), so results differ from float32 only in rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

BLOCK = 32  # weights that share a scale and an offset
GROUP = 16  # rows that the kernel takes side by side: the lanes of one vector


@dataclass(frozen=True)
class BlockCodes:
    codes: NDArray[np.int8]  # [rows, K]
    scales: NDArray[np.float32]  # [rows, K / 32]
    offsets: NDArray[np.float32]  # [rows, K / 32]

    @classmethod
    def join(cls, parts: Sequence["BlockCodes"]) -> "BlockCodes":
        """Stack rows, as fused layers do."""
        columns = [(part.codes, part.scales, part.offsets) for part in parts]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    @classmethod
    def quantize(cls, weight: NDArray[np.float32]) -> "BlockCodes":
        """Round float weights to 8 bits, as Q8_0 does. For drafters: what they propose is checked anyway.

        Scales are bfloat16 numbers: the largest weight of a block still rounds to 127 of them, and products of 7 and 8
        bits are exact in float32, so rounding what this gives once more changes nothing.
        """
        blocks = weight.reshape(len(weight), -1, BLOCK)
        scales = torch.from_numpy(np.abs(blocks).max(axis=-1) / np.float32(127)).bfloat16().float().numpy()
        codes = np.rint(blocks / np.maximum(scales, np.float32(1e-30))[..., None]).astype(np.int8)
        return cls(codes.reshape(weight.shape), scales, np.zeros_like(scales))

    def rows(self, order: NDArray[np.int64]) -> "BlockCodes":
        return BlockCodes(self.codes[order], self.scales[order], self.offsets[order])

    def dequantize(self) -> NDArray[np.float32]:
        blocks = self.codes.reshape(*self.scales.shape, BLOCK) * self.scales[..., None] + self.offsets[..., None]
        return blocks.reshape(self.codes.shape).astype(np.float32)


def decode_blocks(data: NDArray[np.uint8], kind: str) -> BlockCodes | None:
    """Codes of a GGUF tensor's raw bytes [rows, bytes]; None for kinds that are not simple blocks of 32."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    if kind not in sizes or data.ndim != 2:
        return None
    blocks = np.ascontiguousarray(data).reshape(data.shape[0], -1, sizes[kind])  # [rows, blocks, bytes]
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    offsets = np.zeros_like(scales)
    if kind == "Q8_0":
        codes = blocks[..., 2:].copy().view(np.int8)
    else:
        packed = blocks[..., 4 if kind == "Q4_1" else 2 :]  # low halves first, then high halves
        codes = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)
    if kind == "Q4_0":
        codes -= 8  # centred: 8 stands for zero
    elif kind == "Q4_1":
        offsets = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    return BlockCodes(codes.reshape(data.shape[0], -1), scales, offsets)


class BlockLinear(nn.Module):
    """A linear layer that multiplies from codes for few tokens and from packed float32 weights for many.

    Codes are a quarter of the bytes of float32, which decides for few tokens. For many the arithmetic does, and the
    packed product wins because it need not convert.
    """

    MAX_TOKENS = 32

    def __init__(self, codes: BlockCodes, many: nn.Module, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.codes.shape
        self.many = many
        self.num_threads = num_threads
        self._packed = _arrange(codes)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.MAX_TOKENS:
            return self.many(x)
        from blockpilot.models.block_kernels import multiply

        result = np.empty((x.shape[0], len(self._packed[0]) * GROUP), np.float32)
        multiply(*self._packed, x.contiguous().numpy(), result, self.num_threads)
        out = torch.from_numpy(result)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]


class BlockNorm(nn.Module):
    """RMSNorm of few tokens as one compiled loop; PyTorch's own takes half a dozen passes on a CPU."""

    def __init__(self, many: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.many = many.weight, many
        self._values, self._eps = many.weight.detach().numpy(), np.float32(many.eps)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[0] > BlockLinear.MAX_TOKENS:
            return self.many(x)
        from blockpilot.models.block_kernels import normalize

        result = np.empty(x.shape, np.float32)
        normalize(x.contiguous().numpy(), self._values, self._eps, result)
        return torch.from_numpy(result)


def compile_kernels(num_threads: int) -> None:
    """Compile (once per machine; later from Numba's cache) before the first token has to wait for it."""
    layer = BlockLinear(BlockCodes.quantize(np.ones((1, BLOCK), np.float32)), nn.Identity(), num_threads)
    layer(BlockNorm(nn.RMSNorm(BLOCK, 1e-6))(torch.ones(1, BLOCK)))
    torch.set_num_threads(num_threads)  # Numba's pool raises it to the number of cores


def _arrange(codes: BlockCodes) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """The kernel's order: groups of 16 rows, inside a group block by block, inside a block weight by weight."""
    num_rows, num_blocks = codes.scales.shape
    padding = ((0, -num_rows % GROUP), (0, 0))
    quantized = np.pad(codes.codes, padding).reshape(-1, GROUP, num_blocks, BLOCK).transpose(0, 2, 3, 1)
    parts = (np.pad(part, padding).reshape(-1, GROUP, num_blocks) for part in (codes.scales, codes.offsets))
    scales, offsets = (np.ascontiguousarray(part.transpose(0, 2, 1)) for part in parts)
    return np.ascontiguousarray(quantized), scales, offsets
