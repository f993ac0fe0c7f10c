"""What is to be reported: new text of requests, and finished answers."""

from collections.abc import Iterable
from typing import NamedTuple

from blockpilot.core.records import Completion
from blockpilot.engine.sequence import Sequence


class Update(NamedTuple):
    """What a step has brought one request."""

    request_id: int
    new_text: str
    completion: Completion | None  # set when the request has finished


class Outbox:
    """Requests whose answers have grown wait here until their text is written, updates until they are taken."""

    def __init__(self) -> None:
        self._grown: dict[int, Sequence] = {}  # by request id, in their order
        self._shown: dict[int, int] = {}  # request id -> characters already reported
        self._updates: list[Update] = []

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._grown.update((sequence.request_id, sequence) for sequence in sequences)

    def finished(self) -> list[Sequence]:
        return [sequence for sequence in self._grown.values() if sequence.finish_reason is not None]

    def write(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Make text of the tokens of these requests, or of all that wait."""
        for sequence in list(self._grown.values()) if sequences is None else sequences:
            del self._grown[sequence.request_id]
            if not sequence.output_ids:
                continue
            sequence.write()
            new_text = sequence.text[self._shown.get(sequence.request_id, 0) :]
            self._shown[sequence.request_id] = len(sequence.text)
            completion = sequence.completion() if sequence.finish_reason else None
            self._updates.append(Update(sequence.request_id, new_text, completion))

    def take(self) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    def forget(self, sequence: Sequence) -> None:
        """A request that leaves; its updates stay."""
        self._grown.pop(sequence.request_id, None)
        self._shown.pop(sequence.request_id, None)
