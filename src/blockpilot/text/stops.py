"""Stop strings in a stream: what may be shown now, and whether the answer has ended."""

from collections.abc import Sequence


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
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
