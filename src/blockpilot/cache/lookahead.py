"""Passes that a device begins before the host asks for them.

A kernel that accepts tokens can write the next pass into its plan. The device then goes on at once, and the host learns
meanwhile what was accepted. Whoever owns the plans of passes owns what was so begun: nobody may write a plan, nor touch
the slots of its requests, before that is used or taken back.
"""

from collections.abc import Hashable, Sequence

from blockpilot.models.gpu import Stopwatch


class Lookahead:
    def __init__(self) -> None:
        self._begun: object | None = None  # the pass
        self._over: tuple[Stopwatch, int] | None = None  # what to wait for
        self._requests: list[Hashable] | None = None  # whom it serves; None: not known yet

    def begin(self, begun: object, watch: Stopwatch, mark: int) -> None:
        """That pass is on its way, and over when the device comes by the mark."""
        self._begun, self._over, self._requests = begun, (watch, mark), None

    def expect(self, requests: Sequence[Hashable]) -> None:
        """What was accepted is known, and with it whom the pass serves, if there is one."""
        self._requests = list(requests)

    def disown(self) -> None:
        """A request has left: another in its slot, even if it looks the same, must not get what was begun for it."""
        self._requests = None

    def take(self, wanted: object, requests: Sequence[Hashable]) -> bool:
        """Whether what was begun is that pass for exactly these; if not, it is taken back."""
        is_it = self._begun is wanted and self._requests == list(requests)
        if not is_it:
            self.cancel()
        self._begun = None
        return is_it

    def cancel(self) -> None:
        """Nobody wants what was begun: wait until it is over, and forget it."""
        if self._begun is not None and self._over is not None:
            watch, mark = self._over
            watch.wait(mark)
        self._begun = None
