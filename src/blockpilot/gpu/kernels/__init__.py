"""A pass on a GPU in few kernels (Triton); `gpu/interface.py` says what each does.

A token's result is the same bits whatever else is in the pass: each module says how it keeps that (docs/exactness.md).
float32 products use IEEE arithmetic, not TF32.

What differs from step to step (slots, lengths, masks) is read from device memory, so that a pass can be captured once
as a CUDA graph and replayed for ever. On GPUs that can (Hopper and later) a kernel is launched while the one before it
still runs and waits for its results only where it needs them; products meanwhile call their weights into the cache.
"""

from blockpilot.gpu.kernels.attention import attend, lay_out, rotate_attend
from blockpilot.gpu.kernels.cache_rows import move_rows, rotate_store, store_context
from blockpilot.gpu.kernels.experts import norm_routed_mlp
from blockpilot.gpu.kernels.products import gated_linear, linear, norm_gated_linear, norm_linear
from blockpilot.gpu.kernels.ranking import rank_tokens, score_pairs, send
from blockpilot.gpu.kernels.sublayers import add_norm, convolve, embed
from blockpilot.gpu.kernels.trees import accept_trees, grow_trees

__all__ = [
    "accept_trees",
    "add_norm",
    "attend",
    "convolve",
    "embed",
    "gated_linear",
    "grow_trees",
    "lay_out",
    "linear",
    "move_rows",
    "norm_gated_linear",
    "norm_linear",
    "norm_routed_mlp",
    "rank_tokens",
    "rotate_attend",
    "rotate_store",
    "score_pairs",
    "send",
    "store_context",
]
