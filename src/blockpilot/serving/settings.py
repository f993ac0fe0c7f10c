"""What the two sides of the server agree on: how it was asked to run, and what its model is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    model_name: str
    api_key: str | None = None
    max_queue: int = 256  # requests that may wait for a slot
    max_seconds: float = 600.0  # of one call
    max_body: int = 8 << 20  # bytes
    drain_seconds: float = 60.0  # for answers in flight when the server is told to end
    stream_interval: float = 0.03  # seconds between two pieces of a stream; 0: one for every step
    stall_seconds: float = 60.0  # for a client to send its body, or to read what it was sent
    is_local: bool = True  # whether other machines are kept out
    origins: tuple[str, ...] = ()  # of pages that browsers may let call us


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer as data."""

    backend: str
    special_tokens: dict[str, str]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the web side must know of the engine."""

    tokenizer: TokenizerParts
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_length: int
    num_slots: int
    drafter: str | None
    max_block_size: int | None  # the drafter's
    pilot: str
    device: str
    dtype: str
    is_exact: bool
