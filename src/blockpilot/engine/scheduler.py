"""Who runs next: requests wait for a slot, go through prefill in chunks, then decode until they finish."""

from collections import deque

from blockpilot.engine.sequence import Sequence


class Scheduler:
    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def is_running(self) -> bool:
        """Whether requests hold slots."""
        return bool(self.prefilling or self.decoding)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def next_waiting(self) -> Sequence:
        sequence = self.waiting.popleft()
        self.prefilling.append(sequence)
        return sequence

    def prefill_chunks(self) -> list[tuple[Sequence, list[int]]]:
        """Prompt pieces for one pass, oldest request first, together at most `token_budget` tokens."""
        budget, chunks = self.token_budget, []
        for sequence in self.prefilling:
            if budget <= 0:
                break
            chunk = sequence.prompt_ids[sequence.num_prefilled : sequence.num_prefilled + budget]
            chunks.append((sequence, chunk))
            budget -= len(chunk)
        return chunks

    def start_decoding(self, sequence: Sequence) -> None:
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)

    @property
    def everyone(self) -> list[Sequence]:
        return [*self.waiting, *self.prefilling, *self.decoding]

    def find(self, request_id: int) -> Sequence | None:
        return next((sequence for sequence in self.everyone if sequence.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.prefilling, self.decoding):
            if sequence in queue:
                queue.remove(sequence)
