"""What is in flight: at most two steps, so that a device always has the next one when it ends one.

`launch` begins a step and enqueues the next one behind it; each `land_next` lands one. Meanwhile the host makes text of
the tokens of the step before, and the caller does what it does with them.

    device    | step n    | step n+1  | step n+2  |
    host        land n-1, launch n+1    land n, launch n+2
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from blockpilot.engine.sequence import Sequence
from blockpilot.engine.speculative_step import NO_CHOICES, DecodeLoop, StepInFlight


class Pipeline:
    def __init__(self, loop: DecodeLoop) -> None:
        self.loop = loop
        self.steps: deque[StepInFlight] = deque()  # the first one first
        self._chosen = NO_CHOICES  # of the next step, where pilots have been asked already
        self._since: float | None = None  # when the last step landed, if nothing else has happened since

    def launch(self, sequences: list[Sequence], *, may_follow: bool) -> list[Sequence]:
        """Keep the device busy with these requests; those whose answers have grown already, on the host.

        With `may_follow` the step behind is enqueued, too.
        """
        grown: list[Sequence] = []
        if not sequences:
            self._chosen = NO_CHOICES
        elif not self.steps:
            self.steps.append(self.loop.begin(sequences, self._chosen, self._since or time.perf_counter()))
            self._chosen = NO_CHOICES
            if self.steps[0].executor is self.loop.executors[-1]:  # the host's steps land at once
                grown = self.land_next()
        if may_follow and len(self.steps) == 1:
            following, self._chosen = self.loop.follow(self.steps[0])
            self.steps.extend([] if following is None else [following])
        return grown

    def land_next(self) -> list[Sequence]:
        """Requests whose answers the oldest step in flight has let grow; none if there is no such step."""
        if not self.steps:
            return []
        grown, landed = self.loop.land(self.steps.popleft())
        self.steps = deque(replace(behind, started=landed) for behind in self.steps)
        self._since = landed
        return grown

    def pause(self) -> None:
        """Restart the clock: time outside of decoding is not charged to the next step."""
        self._since = None

    def drop(self) -> Collection[Sequence]:
        """Forget what is in flight; whose requests it was. The device must be through with it before slots are used."""
        dropped = [sequence for step in self.steps for sequence in step.sequences]
        self.steps.clear()
        self._chosen, self._since = NO_CHOICES, None
        return dropped
