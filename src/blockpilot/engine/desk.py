"""Calls from many threads, one engine: whoever waits for an update may lead a step for all.

    open     the request waits for the next step
    wait     for the next update of a request. If nobody leads, this thread does: it takes in who has come and lets go
             who has left, advances the engine by one step and hands out what that brought
    close    a request that has not ended is aborted before the next step

The engine itself knows one thread at a time. A thread that leads holds no lock while it steps, so that others can come,
wait and leave meanwhile. If a step fails, its error belongs to the requests that were dropped for it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from blockpilot.core.errors import BlockPilotError, describe_failure
from blockpilot.core.records import Update
from blockpilot.engine.engine import Engine
from blockpilot.engine.sequence import Sequence

Wanted = Callable[[Update], bool]


@dataclass(eq=False)
class _Mailbox:
    """Updates of one request that its caller has not taken yet."""

    changed: threading.Condition
    updates: deque[Update] = field(default_factory=deque)
    is_wanted: Wanted | None = None  # what its caller sleeps for; None: nobody sleeps
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.failure is not None or any(update.completion is not None for update in self.updates)


class Desk:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()  # of everything below
        self._boxes: dict[int, _Mailbox] = {}
        self._arrived: list[Sequence] = []
        self._left: list[int] = []
        self._leader: int | None = None  # the thread that uses the engine
        self._free = threading.Condition(self._lock)
        self._num_alone = 0  # threads that want the engine for themselves

    def open(self, sequence: Sequence) -> int:
        with self._lock:
            self._boxes[sequence.request_id] = _Mailbox(threading.Condition(self._lock))
            self._arrived.append(sequence)
        return sequence.request_id

    def wait(self, request_id: int, is_wanted: Wanted = lambda update: True) -> Update:
        """The next update that is wanted; those before it are dropped."""
        with self._lock:
            box = self._boxes[request_id]
            try:
                while True:
                    while box.updates:
                        if is_wanted(update := box.updates.popleft()):
                            return update
                    if box.failure is not None:
                        raise box.failure
                    if self._leader is None and not self._num_alone:
                        self._lead(box)
                    else:
                        self._sleep(box, is_wanted)
            finally:
                self._pass_on()

    def close(self, request_ids: Iterable[int]) -> None:
        with self._lock:
            gone = {request_id for request_id in request_ids if self._boxes.pop(request_id, None) is not None}
            self._arrived = [sequence for sequence in self._arrived if sequence.request_id not in gone]
            self._left += gone
            self._pass_on()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The engine for this thread alone: no step runs meanwhile but those that it takes itself."""
        own = threading.get_ident()
        if self._leader == own:
            yield
            return
        with self._lock:
            self._num_alone += 1
            try:
                while self._leader is not None:
                    self._free.wait()
                self._leader = own
            finally:
                self._num_alone -= 1
        try:
            yield
        finally:
            with self._lock:
                self._leader = None
                self._pass_on()

    def deliver(self, updates: Iterable[Update]) -> None:
        """For who has the engine alone: what its steps have brought others."""
        with self._lock:
            self._hand_out(updates)

    def _lead(self, box: _Mailbox) -> None:
        """One step, without the lock; then hand out what it brought."""
        self._leader = threading.get_ident()
        try:
            arrived, self._arrived = self._arrived, []
            updates, failure = self._step(arrived)
            self._hand_out(updates)
            if failure is not None:
                dropped = self._tell_dropped(failure)
                if not dropped or box in dropped or not isinstance(failure, Exception):
                    raise failure
        finally:
            self._leader = None
            if self._num_alone:
                self._free.notify()

    def _step(self, arrived: Iterable[Sequence]) -> tuple[list[Update], BaseException | None]:
        self._lock.release()
        try:
            for sequence in arrived:
                self.engine.add(sequence)
            return self.engine.step(), None
        except BaseException as error:
            return self.engine.take_updates(), error
        finally:
            self._lock.acquire()

    def _sleep(self, box: _Mailbox, is_wanted: Wanted) -> None:
        """Until there is such an update, or somebody must lead."""
        box.is_wanted = is_wanted
        try:
            box.changed.wait()
        finally:
            box.is_wanted = None

    def _hand_out(self, updates: Iterable[Update]) -> None:
        for update in updates:
            if (box := self._boxes.get(update.request_id)) is not None:
                box.updates.append(update)
                if box.is_wanted is not None and box.is_wanted(update):
                    box.changed.notify()

    def _tell_dropped(self, failure: BaseException) -> list[_Mailbox]:
        """The requests that a failed pass has taken with it get an error of their own."""
        known = {sequence.request_id for sequence in self._arrived}
        dropped = [
            box
            for request_id, box in self._boxes.items()
            if not box.is_over and request_id not in known and self.engine.find(request_id) is None
        ]
        for box in dropped:
            reason = "was interrupted" if not isinstance(failure, Exception) else describe_failure("failed", failure)
            box.failure = BlockPilotError(f"the request was dropped: a pass that it shared {reason}; ask again")
            box.failure.__cause__ = failure
            box.changed.notify()
        return dropped

    def _pass_on(self) -> None:
        """If nobody leads: let go who has left, then somebody else may lead."""
        if self._leader is not None:
            return
        left, self._left = self._left, []
        for request_id in left:
            self.engine.abort(request_id)
        if self._num_alone:
            self._free.notify()
        elif (sleeper := next((box for box in self._boxes.values() if box.is_wanted is not None), None)) is not None:
            sleeper.changed.notify()
