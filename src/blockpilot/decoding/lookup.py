"""Prompt lookup: what followed the last time the same words stood in a request's text. Needs no weights.

Every one, two and three tokens are indexed by where they last ended, and three remember where they ended before. So a
token costs a few dictionary entries, and a search a few look-ups: among the places where the last three tokens stand,
the one that agrees with most of what was written last wins, the latest of equals.
"""

from collections.abc import Iterable, Sequence

from blockpilot.core.draft import MAX_MATCH, Copy

KEY = 3  # tokens that are looked for
MAX_PLACES = 16  # that are compared
FADE = 0.9  # what a step leaves of the record
_NONE = -1  # no token


class Lookup:
    """The text of one request."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._last = (_NONE, _NONE)  # the last two tokens
        self._ends: dict[int | tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}  # where the three tokens that end at a place ended before that
        self._offered: Sequence[int] = ()  # the last copy, which begins at `_start`
        self._start = 0
        self._num_right = self._num_seen = 0.0  # tokens of copies, the first wrong one of each included; faded
        self.push(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def push(self, token_ids: Iterable[int]) -> None:
        tokens, ends, (first, second) = self._token_ids, self._ends, self._last
        for third in token_ids:
            tokens.append(third)
            end = len(tokens)
            key = (first, second, third)
            if key in ends:
                self._earlier[end] = ends[key]
            ends[key] = ends[second, third] = ends[third] = end
            first, second = second, third
        self._last = first, second

    def find(self, anchor_id: int, most: int) -> Copy | None:
        """At most so many tokens that may follow the anchor, which stands behind the text.

        Where the copy runs into the anchor, it goes round: a text that repeats itself may do so again.
        """
        if self._offered:
            self._settle(anchor_id)
        tokens, ends, (first, second) = self._token_ids, self._ends, self._last
        end, num_matched = ends.get((first, second, anchor_id), 0), KEY
        if end:
            end, num_matched = self._longest(end, [*tokens[-MAX_MATCH + 1 :], anchor_id])
        elif end := ends.get((second, anchor_id), 0):
            num_matched = 2
        else:
            end, num_matched = ends.get(anchor_id, 0), 1
        if not end or most < 1:
            return None
        copied = [*tokens[end : end + most], anchor_id][:most]
        period = len(tokens) + 1 - end
        while len(copied) < most:
            copied.append(copied[-period])
        self._offered, self._start = copied, len(tokens) + 1
        return Copy(copied, num_matched, self._num_right, self._num_seen)

    def _longest(self, end: int, history: Sequence[int]) -> tuple[int, int]:
        """Of this place and those before it, the one behind which most tokens are those at the end of `history`."""
        tokens, best, most = self._token_ids, end, 0
        for _ in range(MAX_PLACES):
            size, limit = KEY, min(end, len(history))
            while size < limit and tokens[end - 1 - size] == history[-1 - size]:
                size += 1
            if size > most:
                best, most = end, size
            end = self._earlier.get(end, 0)
            if not end or most == len(history):
                break
        return best, most

    def _settle(self, anchor_id: int) -> None:
        """Compare the last copy with what came instead."""
        offered, self._offered = self._offered, ()
        num_right = num_seen = 0
        for copied, true in zip(offered, [*self._token_ids[self._start :], anchor_id], strict=False):
            num_seen += 1
            if copied != true:
                break
            num_right += 1
        if num_seen:
            self._num_right = FADE * self._num_right + num_right
            self._num_seen = FADE * self._num_seen + num_seen
