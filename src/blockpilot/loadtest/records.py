"""What is known of one request after it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Failure:
    kind: str  # what is counted
    message: str = ""  # what the server or the system said

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True, kw_only=True)
class Record:
    """Times are seconds of one clock."""

    number: int  # in its load, in the order of sending
    prompt_id: str
    planned: float
    sent: float
    ended: float
    chunk_times: Sequence[float] = field(default_factory=lambda: array("d"))  # of chunks with text
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    has_usage: bool = True  # else tokens are chunks
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def delay(self) -> float:
        """How late the client was."""
        return max(0.0, self.sent - self.planned)

    @property
    def ttft(self) -> float | None:
        """Until the first text."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one."""
        if not self.chunk_times or self.num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def whole(self) -> float:
        return self.ended - self.sent

    def as_json(self, began: float) -> dict[str, Any]:
        """In milliseconds; `began` is when its load did."""
        return {
            "number": self.number,
            "prompt": self.prompt_id,
            "sent_ms": _milliseconds(self.sent - began),
            "send_delay_ms": _milliseconds(self.delay),
            "ttft_ms": _milliseconds(self.ttft),
            "tpot_ms": _milliseconds(self.tpot),
            "whole_ms": _milliseconds(self.whole),
            "gaps_ms": [_milliseconds(gap) for gap in self.gaps],
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "num_chunks": len(self.chunk_times),
            "finish_reason": self.finish_reason,
            "error": None if self.failure is None else {"kind": self.failure.kind, "message": self.failure.message},
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
