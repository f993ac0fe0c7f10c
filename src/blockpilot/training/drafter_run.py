"""Everything a user may choose about one training run."""

from dataclasses import dataclass

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.errors import InputError, require_at_least, require_at_most, show_value

KINDS = ("dflash", "dflash2", "eagle3")
_AT_LEAST_ONE = (
    "layers", "selector_rank", "unrolled", "steps", "batch_size", "width", "blocks", "checkpoint_every"
)  # fmt: skip
_NOT_NEGATIVE = ("head_size", "max_width", "evaluate_every", "limit_texts", "seed")
_ABOVE_ZERO = ("learning_rate", "gamma")
_AT_MOST = {"layers": 128, "intermediate_size": 2**18, "selector_rank": 4096, "head_size": 2**22, "unrolled": 64}
_AT_MOST |= {"steps": 10**8, "batch_size": 2**16, "width": 2**16, "max_width": 2**16, "blocks": 2**12}
_AT_MOST |= {"learning_rate": 10, "gamma": 10**6, "seed": 2**31 - 1}
_MAX_TAPS = 64


@dataclass(frozen=True, kw_only=True)
class DrafterRun:
    kind: str = "dflash"
    layers: int = 3
    taps: tuple[int, ...] | int = 5  # how many target layers to read, or which
    block_size: int = 16
    intermediate_size: int | None = None  # None: the target's
    selector_rank: int = 32
    head_size: int = 0  # rows of the head; 0: all, eagle3: 4096
    unrolled: int = 7  # eagle3: steps of training-time test
    steps: int = 2000
    batch_size: int = 64
    width: int = 448
    max_width: int = 0  # longer texts are cut here; 0: at the width
    blocks: int = 32
    min_block_size: int = 16
    learning_rate: float = 1.5e-3
    optimizer: str = "adamw"
    position_weights: str = "exponential"
    gamma: float = 7.0
    labels: str = "data"
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 500
    limit_texts: int = 0
    start_from: str | None = None  # a drafter of the same shape whose weights training starts with
    is_compiled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown kind {self.kind!r}: use {', '.join(KINDS)}")
        require_at_least(self, **dict.fromkeys(_AT_LEAST_ONE, 1), **dict.fromkeys(_NOT_NEGATIVE, 0))
        if isinstance(self.taps, int) and not 1 <= self.taps <= _MAX_TAPS:
            raise InputError(f"--taps must lie between 1 and {_MAX_TAPS}, or name layers, got {show_value(self.taps)}")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise InputError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        require_at_most(self, **_AT_MOST)
        if not 2 <= self.block_size <= MAX_BLOCK_SIZE:
            raise InputError(f"--block-size must lie between 2 and {MAX_BLOCK_SIZE}, got {self.block_size}")
        if not 2 <= self.min_block_size <= self.block_size:
            raise InputError(f"--min-block-size must lie between 2 and {self.block_size}, got {self.min_block_size}")
        if 0 < self.max_width < self.width:
            raise InputError(f"--max-width must be at least --width {self.width}, got {self.max_width}")
        if self.kind == "eagle3" and self.start_from:
            raise InputError("--start-from takes DFlash drafters only: leave it out for --kind eagle3")

    @property
    def longest(self) -> int:
        """Tokens of a text that are looked at."""
        return self.max_width or self.width
