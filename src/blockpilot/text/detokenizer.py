"""Token ids become text while the answer is still being written.

A character may be spread over several tokens, so the decoded text can end in a replacement character that the next
token turns into an emoji. Such an end is held back until it is settled. Every push decodes only a short window: the
last settled piece (decoders may treat the first token of a text differently, so a piece is never decoded on its own)
and what came after it. The cost per token does not grow with the answer. Most tokens of most vocabularies need no
decoding: after whole characters they always add the same text (`Pieces`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], /) -> str: ...


class Pieces(dict[int, str]):
    """What a token adds to any text of whole characters; empty where only decoding tells. Filled as tokens come.

    For vocabularies of bytes alone: there a text is the tokens' bytes, one behind the other.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self._decode([token_id])
        self[token_id] = piece = "" if REPLACEMENT in text else text
        return piece


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Decodes, pieces: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._window: list[int] = []  # the last settled piece, then the ids not settled yet
        self._num_settled = 0  # how many ids of the window belong to the settled piece
        self._settled_length = 0  # characters the settled piece decodes to
        self._final: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """Everything so far, with the end that may still change."""
        return "".join(self._final) + self._held

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now final and was not returned before."""
        if self._pieces is not None and len(self._window) == self._num_settled and (piece := self._pieces[token_id]):
            self._window, self._num_settled, self._settled_length = [token_id], 1, len(piece)
            self._final.append(piece)
            return piece
        self._window.append(token_id)
        fresh = self._tokenizer.decode(self._window)[self._settled_length :]
        if not fresh or fresh.endswith(REPLACEMENT):
            self._held = fresh
            return ""
        return self._settle(fresh)

    def flush(self) -> str:
        """The held-back end as it is: no further token will complete it."""
        return self._settle(self._held) if self._held else ""

    def _settle(self, fresh: str) -> str:
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._settled_length = len(self._tokenizer.decode(self._window))
        self._final.append(fresh)
        self._held = ""
        return fresh
