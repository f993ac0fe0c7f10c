"""The shapes that passes are recorded for, and their limits.

A pass has one of few shapes: its requests, the tokens of each and the length of their contexts are rounded up to a
bucket. Padding rows belong to a spare slot or lie behind a request's own rows; their results are ignored.
"""

from bisect import bisect_left
from collections.abc import Sequence

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_EAGLE3_BLOCK_SIZE, MAX_TREE_NODES

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (2048, 1 << 30)  # how long slots are, roughly: long ones are read by more programs

CHECK_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, MAX_TREE_NODES + 1)  # of a request in a target's pass
MAX_CHECK_ROWS = 4096  # of all requests
MAX_LOGITS_BYTES = 5 << 28  # of all rows together: fewer rows for large vocabularies
PROMPT_TOKENS = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of a request, over prompts
MAX_PROMPT_ROWS = 4096  # of all requests

BLOCKS = (2, 4, 8, 12, 16, 20, 24, 32, 48, MAX_BLOCK_SIZE)  # block sizes of a DFlash draft
MAX_DRAFT_ROWS = 2048  # of one recorded draft: 64 requests of 32
OBSERVED = (2, 4, 8, 16, 32, MAX_BLOCK_SIZE)  # tokens a DFlash drafter is shown; a slot has room for that many more

CHAIN_BLOCKS = (4, 6, 8)  # block sizes of EAGLE-3 chains that are recorded before they are asked for
MAX_CHAIN_ROWS = 1024  # that an EAGLE-3 drafter is shown at once
CHAIN_OBSERVED = (2, 4, 8, MAX_EAGLE3_BLOCK_SIZE)  # tokens that it is shown


def with_shapes(buckets: Sequence[int], own_shapes: Sequence[int]) -> tuple[int, ...]:
    """The buckets, and sizes that shall not be rounded up."""
    return tuple(sorted({*buckets, *own_shapes}))


def round_up(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the value; the value itself beyond the last."""
    place = bisect_left(buckets, value)
    return buckets[place] if place < len(buckets) else value


def largest_below(limit: int, buckets: Sequence[int]) -> int:
    """The largest bucket up to a limit; 0: there is none."""
    return max((bucket for bucket in buckets if bucket <= limit), default=0)


def context_bucket(lengths: Sequence[int]) -> int:
    return round_up(max(lengths), CONTEXTS)


def context_buckets(capacity: int) -> Sequence[int]:
    """Those that requests can come into whose slots, with room for a tree, have this capacity."""
    return CONTEXTS[: 1 + sum(context < capacity - MAX_TREE_NODES for context in CONTEXTS[:-1])]
