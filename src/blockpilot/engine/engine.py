"""The engine: requests come in, `step` advances all of them, finished ones come out.

One `step` admits waiting requests into free slots, runs at most one prefill pass and one speculative step. Requests
join and leave between steps. If a pass fails, the requests in it are taken out and their slots freed before the error
goes on to the caller, so that the engine stays usable.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from blockpilot.core.errors import InputError
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.drafter import Drafter, Observation
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.engine.joint_step import build_joint
from blockpilot.engine.plain_step import build_plain
from blockpilot.engine.runner import PassResult, TargetRunner
from blockpilot.engine.scheduler import Scheduler
from blockpilot.engine.sequence import Sequence
from blockpilot.engine.speculative_step import NOTHING, Flight, begin, follow, land
from blockpilot.models.gpu import wait_for
from blockpilot.pilots.base import Pilot, PrefillState
from blockpilot.text.detokenizer import IncrementalDetokenizer
from blockpilot.text.tokenizer import Tokenizer


class Update(NamedTuple):
    """News of one request after a step."""

    request_id: int
    new_text: str
    completion: Completion | None  # set when the request has finished


class Engine:
    def __init__(
        self,
        runner: TargetRunner,
        tokenizer: Tokenizer,
        *,
        drafter: Drafter | None,
        context_length: int,
        token_budget: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.joint = build_joint(runner, drafter)
        self.plain = build_plain(runner, drafter)
        self.context_length = context_length
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = Scheduler(token_budget)
        self._flights: list[Flight] = []  # steps on their way, the first one first
        self._chosen = NOTHING  # draft sizes of the next step, where pilots have been asked already
        self._since: float | None = None  # when the last one landed, if it did so in this call
        self._landed: list[Sequence] = []  # requests that a step has brought something, whose text may not be known
        self._news: list[Update] = []  # not yet handed over
        self._next_id = 0
        self._shown: dict[int, int] = {}  # request id -> characters already reported

    def add_request(self, prompt_ids: list[int], params: SamplingParams, pilot: Pilot) -> int:
        self._check_prompt(prompt_ids)
        if pilot.num_candidates and self.drafter is None:
            raise InputError(
                f"pilot {pilot.name!r} needs a drafter, and none is loaded; name one or use the pilot 'ar'"
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        sequence = Sequence(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            pilot=pilot,
            eos_token_ids=self.eos_token_ids,
            max_total=self.context_length,
            detokenizer=IncrementalDetokenizer(self.tokenizer, self.tokenizer.pieces),
        )
        self._shown[request_id] = 0
        self.scheduler.add(sequence)
        return request_id

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._news)

    def step(self) -> list[Update]:
        """Advance everything by one prefill pass and one decoding step.

        Steps that a device takes alone are begun here and land in later calls, one in each: meanwhile the host makes
        text of the tokens of the step before, and the caller does what it does with them. At most two are on their way,
        so that the device always has the next one. Where prompts are to be read, all land first.
        """
        self._since = None
        self._land_first()
        touched = self._sort_out()
        while self.scheduler.waiting and self.runner.cache.num_free:
            self.scheduler.next_waiting().slot = self.runner.cache.reserve()
        if self.scheduler.prefilling:
            self.settle()
            touched = list(dict.fromkeys(touched + self._sort_out()))
        in_pass: list[Sequence] = []  # requests that fail if the pass does
        try:
            chunks = self.scheduler.prefill_chunks()
            in_pass = [sequence for sequence, _ in chunks]
            if chunks:
                self._prefill(chunks)
                self._since = None
            touched += in_pass
            in_pass = [sequence for sequence in self.scheduler.decoding if sequence.is_active]
            self._chosen = self._chosen if in_pass else NOTHING
            if in_pass and not self._flights:
                flight = begin(
                    in_pass,
                    self.runner,
                    self.drafter,
                    joint=self.joint,
                    plain=self.plain,
                    since=self._since,
                    chosen=self._chosen,
                )
                self._chosen = NOTHING
                self._flights.append(flight)
                if flight.is_over:
                    touched = list(dict.fromkeys(touched + self._land()))
            if len(self._flights) == 1 and not self.scheduler.prefilling:
                following, self._chosen = follow(self._flights[0], self.drafter, self.joint, self.plain)
                self._flights += [] if following is None else [following]
        except BaseException:
            self._landed += touched  # what has ended is told by the next call
            self._drop(in_pass)
            raise
        self._tell(touched)
        return self.take_news()

    def _sort_out(self) -> list[Sequence]:
        """Requests that have landed since: those that have ended leave, and the others' text can wait."""
        landed, self._landed = list(dict.fromkeys(self._landed)), []
        self._tell([sequence for sequence in landed if sequence.finish_reason])
        return [sequence for sequence in landed if sequence.slot >= 0]

    def take_news(self) -> list[Update]:
        """What `step` would have returned, had it not failed."""
        news, self._news = self._news, []
        return news

    def settle(self) -> None:
        """End all steps that are on their way. What they brought is reported by the next `step`."""
        while self._flights:
            self._land_first()

    def _land_first(self) -> None:
        if not self._flights:
            return
        sequences = self._flights[0].sequences
        try:
            self._landed += self._land()
        except BaseException:
            self._drop(sequences)
            raise

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """Requests of a pass that failed. What it had begun must be over before anybody uses their slots."""
        flights, self._flights, self._chosen = self._flights, [], NOTHING
        try:
            wait_for(self.runner.device)
        finally:
            for sequence in dict.fromkeys([*sequences, *(one for flight in flights for one in flight.sequences)]):
                self._retire(sequence)

    def _tell(self, sequences: Iterable[Sequence]) -> None:
        self._news += [self._report(sequence) for sequence in sequences if sequence.output_ids and sequence.slot >= 0]

    def _land(self) -> list[Sequence]:
        flight = self._flights.pop(0)
        grown, self._since = land(flight, self.joint, self.plain)
        self._flights = [behind._replace(started=self._since) for behind in self._flights]
        return grown

    def abort(self, request_id: int) -> Completion | None:
        """End a request now; its slot is free again. None when it has already left."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        sequence.abort()
        self._retire(sequence)
        return sequence.completion()

    def _prefill(self, chunks: list[tuple[Sequence, list[int]]]) -> None:
        started = time.perf_counter()
        tap_layers = self.drafter.tap_layers if self.drafter else ()
        drafting = {sequence.slot for sequence, _ in chunks if sequence.pilot.num_candidates}

        def show(observations: list[Observation]) -> None:
            shown = [observation for observation in observations if observation.slot in drafting]
            if self.drafter and shown:
                self.drafter.observe(shown)

        prompts = [(sequence.slot, chunk) for sequence, chunk in chunks]
        result = self.runner.prefill(prompts, tap_layers, [sequence.params for sequence, _ in chunks], show)
        for row, (sequence, chunk) in enumerate(chunks):
            sequence.num_prefilled += len(chunk)
            if sequence.is_prefilled:
                sequence.commit([_first_token(sequence, result, row)])
                sequence.pilot = sequence.pilot.start(_prefill_state(sequence, result, row))
                self.scheduler.start_decoding(sequence)
        seconds = time.perf_counter() - started
        for sequence, _ in chunks:
            sequence.prefill_seconds += seconds

    def _report(self, sequence: Sequence) -> Update:
        sequence.write()
        new_text = sequence.text[self._shown[sequence.request_id] :]
        self._shown[sequence.request_id] += len(new_text)
        if sequence.finish_reason is None:
            return Update(sequence.request_id, new_text, None)
        self._retire(sequence)
        return Update(sequence.request_id, new_text, sequence.completion())

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._shown.pop(sequence.request_id, None)
        if sequence.slot >= 0:
            self.runner.cache.free(sequence.slot)
            if self.drafter:
                self.drafter.forget(sequence.slot)
            sequence.slot = -1

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        if not prompt_ids:
            raise InputError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= self.context_length:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.context_length}, "
                "answer included: shorten the prompt"
            )
        vocab_size = self.runner.decoder.config.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in prompt_ids):
            raise InputError(f"the prompt holds token ids outside the vocabulary of {vocab_size}")


def _first_token(sequence: Sequence, result: PassResult, row: int) -> int:
    """The one that the pass has found, or that follows from its logits."""
    if result.best is not None and not sequence.params.is_filtered:
        return result.best[row]
    logits = result.logits[row : row + 1]
    return int(choose_tokens(logits, sequence.params, [len(sequence.prompt_ids)]))


def _prefill_state(sequence: Sequence, result: PassResult, row: int) -> PrefillState | None:
    if not sequence.pilot.reads_prefill or result.hidden is None:
        return None
    return PrefillState(
        num_prompt_tokens=len(sequence.prompt_ids),
        probabilities=result.logits[row].float().softmax(dim=-1),
        hidden=result.hidden[row],
    )
