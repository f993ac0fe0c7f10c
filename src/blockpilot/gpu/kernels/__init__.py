"""A pass on a GPU in few kernels (Triton). float32 products use IEEE arithmetic, not TF32.

    linear         few tokens times all the weights, split over the inner size; whoever reads the result adds the parts
    gated_linear   SwiGLU's silu(gate) * up with both products
    norm_linear, norm_gated_linear   both behind a residual addition and its RMSNorm; for one token in one kernel
    norm_routed_mlp   the same through the experts that a router chooses, reading no other's weights
    rotate_store   per head: q/k norm, rotary, keys and values into their cache rows
    attend         queries of all requests over the filled part of their slots, split over the context, tree masks
    rotate_attend  both at once where a request has few tokens
    add_norm       residual addition and the RMSNorm behind it; of DFlash 2, the convolution before the addition too
    embed          the embeddings of tokens
    gate           silu(gate) * up of a product made elsewhere
    rank_tokens    the best tokens of every row of logits and their log-probabilities
    score_pairs    DFlash 2's selector: how likely a child is after each parent
    convolve       DFlash 2's convolution before a sublayer
    send           numbers from the host's memory to the device, or back
    store_context  a drafter's keys and values of committed tokens into their cache rows
    move_rows      accepted cache rows to their places
    grow_trees     the likeliest nodes of drafted blocks, calibrated, as the trees that a check reads
    accept_trees   the walk along the target's own tokens, and which rows and tokens it keeps

What differs from step to step (slots, lengths, masks) is read from device memory, so that a pass can be captured once
as a CUDA graph and replayed for ever. On GPUs that can (Hopper and later) a kernel is launched while the one before it
still runs and waits for its results only where it needs them; `linear` meanwhile calls its weights into the cache.
"""

from blockpilot.gpu.kernels.attention import attend, choose_splits, rotate_attend
from blockpilot.gpu.kernels.cache_rows import move_rows, rotate_store, store_context
from blockpilot.gpu.kernels.experts import norm_routed_mlp
from blockpilot.gpu.kernels.products import gated_linear, linear, norm_gated_linear, norm_linear
from blockpilot.gpu.kernels.ranking import rank_tokens, score_pairs, send
from blockpilot.gpu.kernels.sublayers import add_norm, convolve, embed, gate
from blockpilot.gpu.kernels.trees import accept_trees, grow_trees

__all__ = [
    "accept_trees",
    "add_norm",
    "attend",
    "choose_splits",
    "convolve",
    "embed",
    "gate",
    "gated_linear",
    "grow_trees",
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
