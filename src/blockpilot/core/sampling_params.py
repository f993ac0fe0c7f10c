"""What a caller may ask of one request."""

from dataclasses import dataclass
from functools import cached_property
from struct import pack, unpack

from blockpilot.core.errors import InputError

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6  # all tokens are equally likely long before
MIN_TEMPERATURE = 1e-5  # below it sampling is greedy: logits divided by it would leave the range of float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Limits and randomness of one answer. The same seed gives the same text under every pilot and block size."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InputError(
                f"temperature must be 0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}, got {self.temperature}"
            )
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (no limit) or positive, got {self.top_k}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed must lie between 0 and {MAX_SEED}, got {self.seed}")
        if any(not text for text in self.stop):
            raise InputError("a stop string is empty: leave it out instead")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens may not be sampled."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @cached_property
    def words(self) -> tuple[int, int, int]:
        """Temperature and seed as int32 numbers, as a GPU reads them."""
        return unpack("<3i", pack("<fQ", self.temperature, self.seed))
