"""Updates on their way to clients: those of a few steps travel as one piece.

A step of a small model takes a few milliseconds, and every piece costs the web side and the client a tenth of one,
processor time that the next step lacks. So a request's updates are joined for a moment. The first one, which a client
waits for, and the last one leave at once.
"""

import time
from collections.abc import Callable, Iterable

from blockpilot.core.records import Update, join_updates


class Outgoing:
    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval`: seconds between two pieces of a stream."""
        self._interval, self._clock = interval, clock
        self._held: dict[int, list[Update]] = {}  # by request id
        self._open: set[int] = set()  # requests whose first update has left
        self._sent = clock()

    def pass_on(self, updates: Iterable[Update]) -> list[Update]:
        """What leaves now, of these and of those that were held."""
        urgent = []
        for update in updates:
            self._held.setdefault(update.request_id, []).append(update)
            if update.completion is not None or update.request_id not in self._open:
                urgent.append(update.request_id)
        if self._clock() - self._sent >= self._interval:
            return self.flush()
        return [self._take(request_id) for request_id in dict.fromkeys(urgent)]

    def flush(self) -> list[Update]:
        """All that is held."""
        self._sent = self._clock()
        return [self._take(request_id) for request_id in list(self._held)]

    def forget(self, request_ids: Iterable[int]) -> None:
        """Of requests that have ended without a last update."""
        self._open.difference_update(request_ids)

    def _take(self, request_id: int) -> Update:
        update = join_updates(self._held.pop(request_id))
        if update.completion is None:
            self._open.add(request_id)
        else:
            self._open.discard(request_id)
        return update
