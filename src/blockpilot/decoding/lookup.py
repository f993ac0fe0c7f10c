"""Prompt lookup: what followed the last time the same words stood in a request's text. Needs no weights.

Every n-gram of up to `KEY` tokens is indexed by where it last ended, and those of `KEY` tokens remember where they
ended before. So a token costs a few dictionary entries, and a search a few look-ups: among the places where the last
`KEY` tokens stand, the one that agrees with most of what was written last wins, the latest of equals.
"""

from collections.abc import Iterable, Sequence

from blockpilot.core.draft import MAX_MATCH, Copy

KEY = 3
MAX_PLACES = 16  # that are compared
FADE = 0.9  # what a step leaves of the record


class Lookup:
    """The text of one request."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}  # where the `KEY` tokens that end at a place ended before that
        self._offered: Sequence[int] = ()  # the last copy, which begins at `_start`
        self._start = 0
        self._num_right = self._num_seen = 0.0  # tokens of copies, the first wrong one of each included; faded
        self.push(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def push(self, token_ids: Iterable[int]) -> None:
        tokens, ends, earlier = self._token_ids, self._ends, self._earlier
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            for size in range(1, min(KEY, end) + 1):
                key = tuple(tokens[-size:])
                if size == KEY and key in ends:
                    earlier[end] = ends[key]
                ends[key] = end

    def find(self, anchor_id: int, most: int) -> Copy | None:
        """At most so many tokens that may follow the anchor, which stands behind the text.

        Where the copy runs into the anchor, it goes round: a text that repeats itself may do so again.
        """
        self._settle(anchor_id)
        end, num_matched = self._best_place(anchor_id)
        if not end or most < 1:
            return None
        tokens = self._token_ids
        copied = [*tokens[end : end + most], anchor_id][:most]
        period = len(tokens) + 1 - end
        while len(copied) < most:
            copied.append(copied[-period])
        self._offered, self._start = copied, len(tokens) + 1
        return Copy(copied, num_matched, self._num_right, self._num_seen)

    def _best_place(self, anchor_id: int) -> tuple[int, int]:
        """Where the text goes on that agrees best with what was written last, and by how many tokens; 0: nowhere."""
        history = [*self._token_ids[-MAX_MATCH + 1 :], anchor_id]
        for size in range(min(KEY, len(history)), 0, -1):
            end = self._ends.get(tuple(history[-size:]), 0)
            if end:
                return self._longest(end, history) if size == KEY else (end, size)
        return 0, 0

    def _longest(self, end: int, history: Sequence[int]) -> tuple[int, int]:
        """Of this place and those before it."""
        best, most = end, self._agreement(end, history)
        for _ in range(MAX_PLACES - 1):
            end = self._earlier.get(end, 0)
            if not end or most == len(history):
                break
            if (found := self._agreement(end, history)) > most:
                best, most = end, found
        return best, most

    def _agreement(self, end: int, history: Sequence[int]) -> int:
        """How many tokens before `end` are those at the end of `history`; `KEY` are."""
        tokens, size, limit = self._token_ids, KEY, min(end, len(history))
        while size < limit and tokens[end - 1 - size] == history[-1 - size]:
            size += 1
        return size

    def _settle(self, anchor_id: int) -> None:
        """Compare the last copy with what came instead."""
        came = [*self._token_ids[self._start :], anchor_id]
        offered, self._offered = self._offered, ()
        num_right = 0
        for copied, true in zip(offered, came, strict=False):
            if copied != true:
                break
            num_right += 1
        if num_seen := min(num_right + 1, len(offered), len(came)):
            self._num_right = FADE * self._num_right + num_right
            self._num_seen = FADE * self._num_seen + num_seen
