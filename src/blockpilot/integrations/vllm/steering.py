"""What a batch drafts and what each of its requests checks: our pilots, driven by another engine's loop.

One step of the other engine is `choose`, its own draft, `select`. Here are plain values only, nothing of vLLM's: the
same code serves every runner and is tested without vLLM. A pilot that fails is reported once; its request goes on at
the configured size.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from blockpilot.core.candidates import Candidates, FloatArray, IntArray
from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.settings import logger
from blockpilot.pilots.base import Pilot, PilotInputs, PrefillState
from blockpilot.pilots.fixed import FixedPilot, PlainPilot


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request of the batch, right after the target has spoken. `is_waiting`: its prompt is not all read yet."""

    request_id: str
    num_prompt_tokens: int
    num_answer_tokens: int  # those of this step among them
    num_emitted: int  # by this step
    max_answer_tokens: int  # by the request's limit and the context's
    temperature: float = 0.0
    override: object = None  # what the request itself asks for, unchecked
    is_waiting: bool = False


@dataclass
class Flight:
    """What is remembered of a request."""

    pilot: Pilot
    num_steps: int = 0
    size: int = 1  # block size chosen for the next draft


class Steering:
    def __init__(self, load: Callable[[object], Pilot], *, num_draft_tokens: int, trained_block_size: int) -> None:
        """`load` gives the pilot for a request's override (None: the configured one). vLLM counts drafted tokens K;
        the block size is K + 1."""
        self.load = load
        self.num_draft_tokens = num_draft_tokens
        self.trained_block_size = trained_block_size
        self.flights: dict[str, Flight] = {}
        self._inputs: list[PilotInputs | None] = []
        self._reported: set[str] = set()

    def choose(
        self,
        rows: Sequence[Row],
        *,
        read_prefill: Callable[[int], PrefillState],
        known_ids: Collection[str],
        limit: int | None = None,
    ) -> int:
        """Tokens that the batch shall draft: as many as the request that wants most, `limit` at most.

        `read_prefill` gives the state of a row, for pilots that look at it; requests not in `known_ids` are forgotten.
        """
        for gone in self.flights.keys() - known_ids:
            del self.flights[gone]
        most = self.num_draft_tokens if limit is None else min(limit, self.num_draft_tokens)
        batch_size = sum(not row.is_waiting for row in rows)
        self._inputs = []
        largest = 1
        for index, row in enumerate(rows):
            inputs = None
            if not row.is_waiting:
                flight = self.flights.get(row.request_id)
                if flight is None:
                    flight = self.flights[row.request_id] = self._start(row, index, read_prefill)
                else:
                    flight.num_steps += 1
                inputs = self._describe(row, flight, batch_size, most + 1)
                flight.size = self._choose_one(flight, inputs)
                largest = max(largest, flight.size)
            self._inputs.append(inputs)
        return largest - 1

    def select(self, rows: Sequence[Row], token_ids: IntArray, log_probs: FloatArray | None) -> list[list[int]]:
        """The tokens of each row to check, out of the drafted ones [rows, K] with the drafter's log-probabilities."""
        kept = []
        for index, (row, inputs) in enumerate(zip(rows, self._inputs, strict=True)):
            count = 0
            if inputs is not None:
                scores = None if log_probs is None else log_probs[index]
                count = self._count_kept(self.flights[row.request_id], inputs, token_ids[index], scores)
            kept.append(token_ids[index, :count].tolist())
        return kept

    @property
    def wants_scores(self) -> bool:
        """Whether some pilot that drafts now looks at the drafter's probabilities."""
        return any(flight.size > 1 and not isinstance(flight.pilot, FixedPilot) for flight in self.flights.values())

    def _start(self, row: Row, index: int, read_prefill: Callable[[int], PrefillState]) -> Flight:
        try:
            pilot = self.load(row.override)
            return Flight(pilot.start(read_prefill(index) if pilot.reads_prefill else None))
        except Exception as error:
            self._report(error, "pilot" if row.override is None else "pilot that a request asked for")
            return Flight(self._configured())

    def _choose_one(self, flight: Flight, inputs: PilotInputs) -> int:
        if inputs.num_remaining <= 1:  # the last token needs no draft
            return 1
        try:
            size = flight.pilot.choose(inputs)
        except Exception as error:
            self._report(error)
            flight.pilot = self._configured()
            size = flight.pilot.choose(inputs)
        return max(1, min(size, inputs.max_block_size))

    def _count_kept(self, flight: Flight, inputs: PilotInputs, ids: IntArray, scores: FloatArray | None) -> int:
        """A request sees the whole draft, even where a neighbour asked for a longer one than it would have."""
        if flight.size <= 1 or isinstance(flight.pilot, PlainPilot) or not len(ids):
            return 0
        try:
            if scores is None and not isinstance(flight.pilot, FixedPilot):
                raise InputError("the drafter shows no probabilities: turn off use_local_argmax_reduction")
            values = np.zeros(len(ids), dtype=np.float32) if scores is None else scores
            count = len(flight.pilot.select(inputs, Candidates(ids[:, None], values[:, None])))
        except Exception as error:
            self._report(error)
            flight.pilot = self._configured()
            count = len(ids)
        return min(count, len(ids), inputs.num_remaining - 1)

    def _describe(self, row: Row, flight: Flight, batch_size: int, max_block_size: int) -> PilotInputs:
        return PilotInputs(
            num_steps=flight.num_steps,
            context_length=row.num_prompt_tokens + row.num_answer_tokens - 1,
            batch_size=batch_size,
            num_remaining=row.max_answer_tokens - row.num_answer_tokens,
            max_block_size=max_block_size,
            trained_block_size=self.trained_block_size,
            temperature=row.temperature,
            last_emitted=row.num_emitted if flight.num_steps else 0,
        )

    def _configured(self) -> FixedPilot:
        return FixedPilot(self.num_draft_tokens + 1)

    def _report(self, error: Exception, what: str = "pilot") -> None:
        """Once for the configured pilot and once for those of requests: a log must not grow with the traffic."""
        if what in self._reported:
            return
        self._reported.add(what)
        logger.error(
            "A %s failed: %s: %s. The request goes on at the configured size of %d drafted tokens. "
            "Further failures are not reported.",
            what,
            type(error).__name__,
            error,
            self.num_draft_tokens,
            exc_info=not isinstance(error, InputError),
        )
