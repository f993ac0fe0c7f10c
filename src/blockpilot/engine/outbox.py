"""What is to be reported: new text of requests, and finished answers."""

from collections.abc import Iterable

from blockpilot.core.records import Update
from blockpilot.engine import sequence as requests


class Outbox:
    """Requests whose answers have grown wait here until their text is written, updates until they are taken."""

    def __init__(self) -> None:
        self._grown: dict[int, requests.Sequence] = {}  # by request id, in their order
        self._shown: dict[int, tuple[int, int, int]] = {}  # request id -> characters, steps, scores already reported
        self._updates: list[Update] = []

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, sequences: Iterable[requests.Sequence]) -> None:
        self._grown.update((sequence.request_id, sequence) for sequence in sequences)

    def finished(self) -> list[requests.Sequence]:
        return [sequence for sequence in self._grown.values() if sequence.finish_reason is not None]

    def write(self, sequences: Iterable[requests.Sequence] | None = None) -> None:
        """Make text of the tokens of these requests, or of all that wait."""
        for sequence in list(self._grown.values()) if sequences is None else sequences:
            del self._grown[sequence.request_id]
            if not sequence.output_ids and sequence.finish_reason is None:
                continue
            sequence.write()
            text, steps, scores = sequence.text, sequence.steps, sequence.scores
            shown = self._shown.get(sequence.request_id, (0, 0, 0))
            self._shown[sequence.request_id] = len(text), len(steps), len(scores)
            completion = sequence.completion() if sequence.finish_reason else None
            update = Update(sequence.request_id, text[shown[0] :], completion, steps[shown[1] :], scores[shown[2] :])
            self._updates.append(update)

    def take(self) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    def forget(self, sequence: requests.Sequence) -> None:
        """A request that leaves; its updates stay."""
        self._grown.pop(sequence.request_id, None)
        self._shown.pop(sequence.request_id, None)
