"""One request and its state in the engine. `take` is the only place where an answer grows."""

from collections.abc import Sequence as Collection
from dataclasses import dataclass, field
from typing import Any

from blockpilot.core.draft import Copy
from blockpilot.core.errors import describe_failure
from blockpilot.core.records import Completion, StepRecord, TokenScore
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.adjusting import Adjustment
from blockpilot.decoding.guiding import GuideState
from blockpilot.decoding.lookup import Lookup
from blockpilot.pilots.base import Pilot, PilotInputs
from blockpilot.pilots.copies import MAX_COPIED
from blockpilot.text.detokenizer import IncrementalDetokenizer, StopMatcher


@dataclass(kw_only=True, eq=False)
class Sequence:
    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    pilot: Pilot
    eos_token_ids: frozenset[int]
    max_total: int  # prompt and answer together: the context limit
    detokenizer: IncrementalDetokenizer
    memory: Any = None  # the pilot's, from the end of prefill on
    slot: int = -1
    num_prefilled: int = 0
    num_reused: int = 0  # prompt tokens whose rows were there already
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)  # of the answer's tokens, where they are asked for
    guide: GuideState | None = None

    def __post_init__(self) -> None:
        self.adjustment: Adjustment | None = None
        if self.params.is_adjusted:
            self.adjustment = Adjustment(
                params=self.params, prompt_ids=self.prompt_ids, output_ids=self.output_ids, guide=self.guide
            )
        self._stops = StopMatcher(self.params.stop)
        self._end_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._end_ids |= self.eos_token_ids
        self._lookup: Lookup | None = None
        self._num_written = 0  # tokens whose text is known
        self._is_closed = False  # whether all text is
        self._max_output = min(self.params.max_new_tokens, self.max_total - len(self.prompt_ids))

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == len(self.prompt_ids)

    @property
    def is_active(self) -> bool:
        """Whether it is in the engine and has not ended."""
        return self.slot >= 0 and self.finish_reason is None

    @property
    def anchor_id(self) -> int:
        return self.output_ids[-1]

    @property
    def anchor_position(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def num_remaining(self) -> int:
        """Tokens the answer may still gain."""
        return self._max_output - len(self.output_ids)

    def pilot_inputs(
        self, batch_size: int, max_block_size: int, trained_block_size: int, buckets: tuple[int, ...]
    ) -> PilotInputs:
        num_output = len(self.output_ids)
        copy = self._find_copy() if self.reads_copies(buckets) else None
        return PilotInputs(  # in their order: naming them takes as long as the rest of this
            len(self.steps),
            len(self.prompt_ids) + num_output - 1,
            batch_size,
            self._max_output - num_output,
            max_block_size,
            trained_block_size,
            self.params.temperature,
            buckets,
            copy,
        )

    def reads_copies(self, buckets: tuple[int, ...]) -> bool:
        """A device grows its trees before the host knows the text that a copy follows."""
        return self.pilot.reads_copies and not buckets

    def _find_copy(self) -> Copy | None:
        """What may follow the anchor, by the text before it."""
        lookup, ids = self._lookup, self.output_ids
        if lookup is None:
            lookup = self._lookup = Lookup(self.prompt_ids)
        lookup.push(ids[len(lookup) - len(self.prompt_ids) : -1])
        return lookup.find(ids[-1], min(self._max_output - len(ids) - 1, MAX_COPIED))

    def take(self, token_ids: Collection[int]) -> int:
        """Append tokens up to the one that ends the answer; returns how many were taken.

        Their text can wait for `write`, unless a stop string may end the answer in it.
        """
        if self.params.stop:
            return self._take_one_by_one(token_ids)
        first = len(self.output_ids)
        self.output_ids += token_ids[: self._max_output - first]
        for place in range(first, len(self.output_ids)):
            if self.output_ids[place] in self._end_ids:
                del self.output_ids[place + 1 :]
                self.finish_reason = "stop"
                break
        else:
            if len(self.output_ids) >= self._max_output:
                self.finish_reason = "length"
        return len(self.output_ids) - first

    def write(self) -> None:
        """Text of the tokens that have none yet. A detokenizer that fails ends its own request alone."""
        try:
            self._write()
        except Exception as error:
            self.fail(describe_failure("its text could not be made", error))

    def _write(self) -> None:
        pieces = []
        for token_id in self.output_ids[self._num_written :]:
            pieces.append(self._stops.push(self.detokenizer.push(token_id)))
        self._num_written = len(self.output_ids)
        self.text += "".join(pieces)
        if self.finish_reason and not self._is_closed:
            self._is_closed = True
            self._close_text()

    def _take_one_by_one(self, token_ids: Collection[int]) -> int:
        for count, token_id in enumerate(token_ids, start=1):
            self.output_ids.append(token_id)
            self.write()
            if token_id in self._end_ids or self._stops.is_stopped:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self._max_output:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(token_ids)

    def _close_text(self) -> None:
        """Show what was held back; a stop string may complete in it. After a stop there is nothing left to show."""
        self.text += self._stops.push(self.detokenizer.flush()) + self._stops.flush()
        if self._stops.is_stopped:
            self.finish_reason = "stop"

    def fail(self, error: str) -> None:
        """End with an error of its own. Its text stays as far as it is known."""
        if self.error is None:
            self.finish_reason, self.error, self._is_closed = "error", error, True

    def abort(self) -> None:
        """End it where it stands."""
        self.finish_reason = self.finish_reason or "abort"
        self.write()

    def completion(self) -> Completion:
        return Completion(
            text=self.text,
            token_ids=list(self.output_ids),
            num_prompt_tokens=len(self.prompt_ids),
            num_reused_tokens=self.num_reused,
            finish_reason=self.finish_reason or "abort",
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            steps=list(self.steps),
            scores=list(self.scores),
            error=self.error,
        )
