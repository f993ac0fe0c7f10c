"""Which taps are worth recording a graph for: those in the target's own buffer."""

from collections.abc import Callable

from torch import Tensor


class TapsBuffer:
    """The buffer comes again and again; taps of a pass that ran unplanned come once."""

    def __init__(self, forget: Callable[[], None]) -> None:
        """`forget` drops what was recorded for a buffer that is no longer used."""
        self._forget = forget
        self.taps: Tensor | None = None
        self._last: Tensor | None = None

    def set(self, taps: Tensor) -> None:
        if taps is not self.taps:
            self._forget()
        self.taps = taps

    def is_known(self, taps: Tensor) -> bool:
        """Whether these lie in the buffer: the one that was set, else the first, else one that came twice in a row."""
        if self.taps is None or taps is self._last:
            self.set(taps)
        self._last = taps
        return taps is self.taps
