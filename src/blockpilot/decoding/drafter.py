"""What every drafter must do, so that one decode loop serves them all.

A drafter keeps its own state per slot. It is told of every token that entered the target's cache (`observe`, with the
target's taps for those tokens), asked for candidates (`propose`), and told when a slot is given back (`forget`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockpilot.core.draft import HostDraft
from blockpilot.core.sampling_params import SamplingParams


class Observation(NamedTuple):
    """Tokens that just became part of the target's cache in `slot`."""

    slot: int
    token_ids: Sequence[int]
    taps: Tensor | None  # [n, num_taps * H]; None for drafters that read no taps
    rows: Sequence[int] | None = None  # where `taps` holds a whole pass: the rows that are these tokens'
    can_wait: bool = False  # the request will not draft soon, perhaps never

    def own_taps(self) -> Tensor | None:
        return self.taps if self.taps is None or self.rows is None else self.taps[list(self.rows)]


def cut(observations: Sequence[Observation], size: int) -> Iterator[list[Observation]]:
    """Chunks of at most `size` tokens per request, in order; observations must have `rows`."""
    for start in range(0, max(len(one.token_ids) for one in observations), size):
        place = slice(start, start + size)
        yield [
            one._replace(token_ids=one.token_ids[place], rows=one.rows and one.rows[place])
            for one in observations
            if len(one.token_ids) > start
        ]


def join_taps(observations: Sequence[Observation]) -> Tensor:
    """The taps of all observed tokens, packed."""
    return torch.cat([taps for observation in observations if (taps := observation.own_taps()) is not None])


class DraftRequest(NamedTuple):
    slot: int
    anchor_id: int
    position: int  # of the anchor in the sequence
    block_size: int  # anchor + block_size - 1 drafted positions
    num_candidates: int  # how many tokens per position the pilot wants to see
    params: SamplingParams
    limits: tuple[int, int] = (0, 0)  # nodes and depth of its tree, where that grows on the device


class Drafter(Protocol):
    name: str
    tap_layers: tuple[int, ...]  # target layers whose outputs `observe` needs
    block_size: int  # the size it was trained at
    max_block_size: int
    can_resume: bool  # whether a slot's rows outlive `forget`

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]: ...

    def forget(self, slot: int) -> None: ...

    def resume(self, slot: int, token_ids: Sequence[int]) -> None:
        """A slot that was forgotten goes on behind these tokens, which it had observed first."""
