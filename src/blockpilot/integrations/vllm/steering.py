"""What a batch drafts and what each of its requests checks: our pilots, driven by another engine's loop.

One step of the other engine is `choose`, its own draft, `select`; what came of it is learnt in the next. Here are plain
values only, nothing of vLLM's: the same code serves every runner and is tested without vLLM. A pilot that fails is
reported once; its request goes on at the configured size.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockpilot.core.draft import Draft, FloatArray, HostDraft, IntArray
from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.settings import logger
from blockpilot.pilots.base import PLAIN, Asked, Choice, Drafted, Outcome, Pilot, PilotInputs, PrefillState, Selection
from blockpilot.pilots.fixed import FixedPilot


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
class Request:
    """What is remembered of a request."""

    pilot: Pilot
    memory: Any = None
    num_steps: int = 0
    choice: Choice = PLAIN  # for the next draft
    inputs: PilotInputs | None = None  # it was made with; None: the request did not take part
    selection: Selection | None = None  # of the last draft, until its outcome is known
    last_inputs: PilotInputs | None = None  # it was made with

    @property
    def block_size(self) -> int:
        if self.inputs is None or self.inputs.num_remaining <= 1:  # the last token needs no draft
            return 1
        return max(1, min(self.choice.draft_size, self.inputs.max_block_size))


class Steering:
    def __init__(self, load: Callable[[object], Pilot], *, num_draft_tokens: int, trained_block_size: int) -> None:
        """`load` gives the pilot for a request's override (None: the configured one). vLLM counts drafted tokens K;
        the block size is K + 1."""
        self.load = load
        self.num_draft_tokens = num_draft_tokens
        self.trained_block_size = trained_block_size
        self.configured = FixedPilot(num_draft_tokens + 1)  # where a pilot fails
        self.requests: dict[str, Request] = {}
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
        for gone in self.requests.keys() - known_ids:
            del self.requests[gone]
        for request in self.requests.values():
            request.inputs = None
        most = self.num_draft_tokens if limit is None else min(limit, self.num_draft_tokens)
        batch_size = sum(not row.is_waiting for row in rows)
        largest = 1
        for index, row in enumerate(rows):
            if row.is_waiting:
                continue
            if row.request_id not in self.requests:
                self.requests[row.request_id] = self._start(row, index, read_prefill)
            request = self.requests[row.request_id]
            inputs = PilotInputs(
                num_steps=request.num_steps,
                context_length=row.num_prompt_tokens + row.num_answer_tokens - 1,
                batch_size=batch_size,
                num_remaining=row.max_answer_tokens - row.num_answer_tokens,
                max_block_size=most + 1,
                trained_block_size=self.trained_block_size,
                temperature=row.temperature,
            )
            self._choose_one(request, row, inputs)
            request.num_steps += 1
            largest = max(largest, request.block_size)
        return largest - 1

    def select(self, rows: Sequence[Row], token_ids: IntArray, log_probs: FloatArray | None) -> list[list[int]]:
        """The tokens of each row to check, out of the drafted ones [rows, K] with the drafter's log-probabilities."""
        kept = []
        for index, row in enumerate(rows):
            request, count = self.requests.get(row.request_id), 0
            if request is not None and request.block_size > 1 and token_ids.shape[1]:
                count = self._count_kept(request, token_ids[index], None if log_probs is None else log_probs[index])
            kept.append(token_ids[index, :count].tolist())
        return kept

    @property
    def wants_scores(self) -> bool:
        """Whether some pilot that drafts now looks at the drafter's probabilities."""
        return any(one.block_size > 1 and not one.choice.is_whole_chain for one in self.requests.values())

    def _start(self, row: Row, index: int, read_prefill: Callable[[int], PrefillState]) -> Request:
        try:
            pilot = self.load(row.override)
            return Request(pilot, pilot.start(read_prefill(index) if pilot.reads_prefill else None))
        except Exception as error:
            self._report(error, "pilot" if row.override is None else "pilot that a request asked for")
            return Request(self.configured)

    def _choose_one(self, request: Request, row: Row, inputs: PilotInputs) -> None:
        try:
            if request.selection is not None and request.last_inputs is not None:
                tree, promised, head = request.selection  # what was checked in the step before
                outcome = Outcome(request.memory, request.last_inputs, tree.max_depth, promised, head, row.num_emitted)
                request.selection = None
                request.pilot.learn([outcome])
            if inputs.num_remaining > 1:
                request.choice = request.pilot.choose([Asked(request.memory, inputs)])[0]
        except Exception as error:
            self._report(error)
            request.pilot, request.selection = self.configured, None
            request.choice = request.pilot.choose([Asked(None, inputs)])[0]
        request.inputs = inputs

    def _count_kept(self, request: Request, ids: IntArray, scores: FloatArray | None) -> int:
        """A request sees the whole draft, even where a neighbour asked for a longer one than it would have."""
        inputs = request.inputs
        assert inputs is not None
        try:
            if scores is None and not request.choice.is_whole_chain:
                raise InputError("the drafter shows no probabilities: turn off use_local_argmax_reduction")
            values = np.zeros(len(ids), dtype=np.float32) if scores is None else scores
            draft: HostDraft = Draft(ids[:, None], values[:, None])
            request.selection = request.pilot.select([Drafted(request.memory, inputs, request.choice, draft, 0)])[0]
            request.last_inputs = inputs
            count = len(request.selection.tree) - 1
        except Exception as error:
            self._report(error)
            request.pilot, request.selection = self.configured, None
            count = len(ids)
        return min(count, len(ids), inputs.num_remaining - 1)

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
