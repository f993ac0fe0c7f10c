"""Block-quantized weights as integers: one code per weight, a scale and maybe an offset for every 32 or 16 of them.

Loading a GGUF file attaches these codes to its linear layers. They stand for exactly the weights that the file
dequantizes to: w = scale * code + offset. K-quants hold scales and offsets as small whole numbers times a step that 256
weights share; kernels read them as they are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.native.weights import FineScales

BLOCK = 32  # weights that share an offset, and a scale unless there are two
_SUPER = 256  # weights of one block of a K-quant

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class BlockCodes:
    codes: NDArray[np.int8]  # [rows, K]
    scales: Floats  # [rows, K / 32], or [rows, K / 16]
    offsets: Floats | None = None  # [rows, K / 32]
    fine: FineScales | None = None  # the same, as a K-quant holds them

    @classmethod
    def join(cls, parts: Sequence["BlockCodes"]) -> "BlockCodes":
        """Stack rows of one form."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return cls(
            np.concatenate([part.codes for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(offsets) if offsets else None,
            _join_fine([part.fine for part in parts if part.fine is not None]),
        )

    @classmethod
    def quantize(cls, weight: Floats, *, bits: int = 8) -> "BlockCodes":
        """Round float weights to 8 bits, or fewer. For drafters: what they propose is checked anyway.

        Scales are bfloat16 numbers: the largest weight of a block still rounds to 127 of them, and products of 7 and 8
        bits are exact in float32, so rounding what this gives once more changes nothing.
        """
        blocks, most = weight.reshape(len(weight), -1, BLOCK), 2 ** (bits - 1) - 1
        scales = torch.from_numpy(_top(blocks) / np.float32(most)).bfloat16().float().numpy()
        return cls._round(blocks, scales, most)

    @classmethod
    def quantize_q8_0(cls, weight: Floats) -> "BlockCodes":
        """Round float weights as Q8_0 does: scales in half precision."""
        blocks = weight.reshape(len(weight), -1, BLOCK)
        return cls._round(blocks, (_top(blocks) / np.float32(127)).astype(np.float16).astype(np.float32))

    @classmethod
    def _round(cls, blocks: Floats, scales: Floats, most: int = 127) -> "BlockCodes":
        codes = np.rint(blocks / np.maximum(scales, np.float32(1e-30))[..., None])
        return cls(np.clip(codes, -most, most).astype(np.int8).reshape(len(blocks), -1), scales)

    @property
    def form(self) -> tuple[int, bool, bool]:
        """What rows must have in common to be stacked."""
        return self.codes.shape[1] // self.scales.shape[1], self.offsets is None, self.fine is None

    def rows(self, order: NDArray[np.int64]) -> "BlockCodes":
        offsets, fine = self.offsets, self.fine
        if fine is not None:
            own = None if fine.offsets is None else fine.offsets[order]
            fine = FineScales(fine.scales[order], own, fine.steps[:, order])
        return BlockCodes(self.codes[order], self.scales[order], None if offsets is None else offsets[order], fine)

    def dequantize(self) -> Floats:
        blocks = self.codes.reshape(*self.scales.shape, -1) * self.scales[..., None]
        if self.offsets is not None:
            blocks = blocks + self.offsets[..., None]
        return blocks.reshape(self.codes.shape).astype(np.float32)


def pack_six_bits(codes: NDArray[np.int8]) -> Bytes:
    """Codes of -32 .. 31 [rows, K] as bytes [rows, K * 3 / 4]: of each 32 their low nibbles, then their high pairs."""
    blocks = (codes + np.int8(32)).view(np.uint8).reshape(len(codes), -1, BLOCK)
    low, high = blocks & 15, blocks >> 4
    nibbles = low[..., :16] | low[..., 16:] << 4
    pairs = high[..., :8] | high[..., 8:16] << 2 | high[..., 16:24] << 4 | high[..., 24:] << 6
    return np.concatenate((nibbles, pairs), axis=-1).reshape(len(codes), -1)


def unpack_six_bits(packed: Bytes) -> NDArray[np.int8]:
    blocks = packed.reshape(len(packed), -1, BLOCK * 3 // 4)
    pairs = np.concatenate([blocks[..., 16:] >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    codes = (_nibbles(blocks[..., :16]) | pairs << 4).view(np.int8) - np.int8(32)
    return codes.reshape(len(packed), -1)


def join_parts(parts: Sequence[BlockCodes]) -> tuple[BlockCodes, ...]:
    """Rows of one form as one part; a checkpoint may store queries and values differently."""
    return (BlockCodes.join(parts),) if len({part.form for part in parts}) == 1 else tuple(parts)


def _join_fine(parts: Sequence[FineScales]) -> FineScales | None:
    if not parts:
        return None
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return FineScales(
        np.concatenate([part.scales for part in parts]),
        np.concatenate(offsets) if offsets else None,
        np.concatenate([part.steps for part in parts], axis=1),
    )


def decode_blocks(data: Bytes, kind: str) -> BlockCodes | None:
    """Codes of a GGUF tensor's raw bytes [rows, bytes]; None for kinds that are not stored as integers."""
    if kind not in _KINDS or data.ndim != 2:
        return None
    num_bytes, decode = _KINDS[kind]
    found, rows = decode(np.ascontiguousarray(data).reshape(len(data), -1, num_bytes)), (len(data), -1)
    fine = None
    if found.steps is not None:
        steps = np.moveaxis(found.steps, -1, 0)
        offsets = None if found.offsets is None else found.offsets.view(np.int8).reshape(rows)
        fine = FineScales(found.scales.view(np.int8).reshape(rows), offsets, steps)
        found = found._replace(
            scales=found.scales * found.steps[..., :1],
            offsets=None if found.offsets is None else found.offsets * found.steps[..., 1:],
        )
    return BlockCodes(
        found.codes.astype(np.int8, copy=False).reshape(rows),
        found.scales.reshape(rows),
        None if found.offsets is None else found.offsets.reshape(rows),
        fine,
    )


class _Decoded(NamedTuple):
    """[rows, blocks, ...] each. With steps [rows, blocks, 1 or 2] scales and offsets are whole numbers of them."""

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[Any]
    offsets: NDArray[Any] | None = None
    steps: Floats | None = None


def _top(blocks: Floats) -> Floats:
    return np.abs(blocks).max(axis=-1)


def _half(blocks: Bytes, start: int) -> Floats:
    """A number in half precision of every block."""
    return blocks[..., start : start + 2].copy().view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves first, then high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Of 32 codes, each as 16 or 0."""
    return np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little") * np.uint8(16)


def _decode_q4_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_nibbles(blocks[..., 2:]).view(np.int8) - np.int8(8), _half(blocks, 0))


def _decode_q4_1(blocks: Bytes) -> _Decoded:
    return _Decoded(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _decode_q5_0(blocks: Bytes) -> _Decoded:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _Decoded(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _decode_q5_1(blocks: Bytes) -> _Decoded:
    return _Decoded(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _decode_q8_0(blocks: Bytes) -> _Decoded:
    return _Decoded(blocks[..., 2:].copy().view(np.int8), _half(blocks, 0))


def _split_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima [..., 8], 6 bits each, of a K-quant's 12 bytes."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    return scales, np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1)


def _super_nibbles(packed: Bytes) -> Bytes:
    """[..., 8, 32] of 128 bytes: 32 low halves, then the 32 high halves of the same bytes."""
    rows = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate((rows & 15, rows >> 4), axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _decode_q3_k(blocks: Bytes) -> _Decoded:
    """Bytes of one bit of each code, of two bits, of scales, and the step."""
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    pairs = blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = pairs.reshape(high.shape).view(np.int8) + high.view(np.int8) * np.int8(4) - np.int8(4)
    low = _nibbles(blocks[..., 96:104])
    top = blocks[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | top.reshape(low.shape) * np.uint8(16)).view(np.int8) - np.int8(32)
    return _Decoded(codes, scales, None, _half(blocks, 108)[..., None])


def _steps(blocks: Bytes) -> Floats:
    """Of scales, and of minima, which are taken away."""
    return np.stack((_half(blocks, 0), -_half(blocks, 2)), axis=-1)


def _decode_q4_k(blocks: Bytes) -> _Decoded:
    return _Decoded(_super_nibbles(blocks[..., 16:]), *_split_scales(blocks[..., 4:16]), _steps(blocks))


def _decode_q5_k(blocks: Bytes) -> _Decoded:
    fifths = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _super_nibbles(blocks[..., 48:]) | fifths * np.uint8(16)
    return _Decoded(codes, *_split_scales(blocks[..., 4:16]), _steps(blocks))


def _decode_q6_k(blocks: Bytes) -> _Decoded:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=-2).reshape(*blocks.shape[:-1], 2, 4, 32)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) * np.uint8(16)
    codes = (low | high).view(np.int8) - np.int8(32)
    return _Decoded(codes, blocks[..., 192:208].copy().view(np.int8), None, _half(blocks, 208)[..., None])


_KINDS: dict[str, tuple[int, Callable[[Bytes], _Decoded]]] = {  # bytes of a block, and what they hold
    "Q4_0": (18, _decode_q4_0),
    "Q4_1": (20, _decode_q4_1),
    "Q5_0": (22, _decode_q5_0),
    "Q5_1": (24, _decode_q5_1),
    "Q8_0": (34, _decode_q8_0),
    "Q3_K": (110, _decode_q3_k),
    "Q4_K": (144, _decode_q4_k),
    "Q5_K": (176, _decode_q5_k),
    "Q6_K": (210, _decode_q6_k),
}
INTEGER_KINDS = tuple(_KINDS)
