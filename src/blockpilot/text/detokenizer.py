"""Token ids become text while the answer is still being written, up to a stop string.

A character may be spread over several tokens, so the decoded text can end in a replacement character that the next
token turns into an emoji. Such an end is held back until it is settled. Every push decodes only a short window: the
last settled piece (decoders may treat the first token of a text differently, so a piece is never decoded on its own)
and what came after it. The cost per token does not grow with the answer. Most tokens of most vocabularies need no
decoding: after whole characters they always add the same text (`Pieces`).
"""

from collections.abc import Callable, Mapping, Sequence

_REPLACEMENT = "\ufffd"


Decode = Callable[[Sequence[int]], str]


class Pieces(dict[int, str]):
    """What a token adds to any text of whole characters; empty where only decoding tells. Filled as tokens come.

    For vocabularies of bytes alone: there a text is the tokens' bytes, one behind the other.
    """

    def __init__(self, decode: Decode) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self._decode([token_id])
        self[token_id] = piece = "" if _REPLACEMENT in text else text
        return piece


class IncrementalDetokenizer:
    def __init__(self, decode: Decode, pieces: Mapping[int, str] | None = None) -> None:
        self._decode = decode
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
        fresh = self._decode(self._window)[self._settled_length :]
        if not fresh or fresh.endswith(_REPLACEMENT):
            self._held = fresh
            return ""
        return self._settle(fresh)

    def flush(self) -> str:
        """The held-back end as it is: no further token will complete it."""
        return self._settle(self._held) if self._held else ""

    def _settle(self, fresh: str) -> str:
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._settled_length = len(self._decode(self._window))
        self._final.append(fresh)
        self._held = ""
        return fresh


class StopMatcher:
    """Fed with text piece by piece; holds back any tail that could still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.is_stopped = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Text that is safe to show. Once a stop string appears, nothing after its start ever is."""
        if self.is_stopped or not self.stops:
            return "" if self.is_stopped else piece
        text = self._held + piece
        starts = [text.find(stop) for stop in self.stops if stop in text]
        if starts:
            self.is_stopped, self._held = True, ""
            return text[: min(starts)]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back tail, when the answer ended without completing a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
