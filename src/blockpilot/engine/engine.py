"""The engine: requests come in, `step` advances all of them, finished ones come out.

    land      the oldest step in flight: answers grow, finished requests leave
    admit     waiting requests into free slots
    prefill   at most one pass over prompts, when nothing is in flight
    launch    the next decoding step, and on a device the one behind it
    report    text of what has grown

Requests join and leave between steps. What goes wrong with one request alone, because of its pilot, its detokenizer or
scores that are no numbers, ends that one with an error. If a whole pass fails, the requests in it are taken out and
their slots freed before the error goes on to the caller, so that the engine stays usable.
"""

import itertools
import time
from collections.abc import Collection, Iterable
from typing import Any

from blockpilot.core.device import on_one_thread
from blockpilot.core.errors import BlockPilotError, InputError, show_value
from blockpilot.core.records import Completion, Update
from blockpilot.core.sampling_params import MAX_COUNT, SamplingParams, read_token_ids
from blockpilot.decoding.adjusting import choose_token, score_tokens
from blockpilot.decoding.drafter import Drafter, Observation
from blockpilot.decoding.guiding import GuideMaker
from blockpilot.decoding.host_step import HostExecutor
from blockpilot.decoding.sampling import NO_TOKEN, choose_tokens
from blockpilot.decoding.target import PassResult, TargetRunner
from blockpilot.engine.outbox import Outbox
from blockpilot.engine.pipeline import Pipeline
from blockpilot.engine.prefixes import Prefixes
from blockpilot.engine.scheduler import Scheduler
from blockpilot.engine.sequence import Sequence
from blockpilot.engine.speculative_step import DecodeLoop, end_alone
from blockpilot.gpu.device import on_device, wait_for
from blockpilot.gpu.step import DeviceExecutor
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.pilots.base import Pilot, PrefillState
from blockpilot.text.detokenizer import IncrementalDetokenizer
from blockpilot.text.tokenizer import Tokenizer


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
        target_name: str = "the target",
        reuses_prefixes: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.context_length = context_length
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = Scheduler(token_budget)
        self.device_executor = DeviceExecutor(runner, drafter) if isinstance(runner, GpuTargetRunner) else None
        host = HostExecutor(runner, drafter)
        executors = (host,) if self.device_executor is None else (self.device_executor, host)
        self.pipeline = Pipeline(DecodeLoop(executors, drafter, runner.buckets, target_name))
        self.outbox = Outbox()
        self.prefixes = Prefixes(runner.cache, drafter) if reuses_prefixes else None
        self.guides = GuideMaker(
            tokenizer, vocab_size=runner.decoder.config.vocab_size, eos_token_ids=sorted(self.eos_token_ids)
        )
        self._ids = itertools.count()

    def add_request(self, prompt_ids: Collection[int], params: SamplingParams, pilot: Pilot) -> int:
        sequence = self.make_request(prompt_ids, params, pilot)
        self.add(sequence)
        return sequence.request_id

    def make_request(
        self, prompt_ids: Collection[int], params: SamplingParams, pilot: Pilot, *, number: int | None = None
    ) -> Sequence:
        """Everything that can be wrong with a request is found here. Any thread may call this.

        `number` is its id where somebody else counts the requests.
        """
        if not isinstance(params, SamplingParams) or not isinstance(pilot, Pilot):
            raise InputError(
                f"a request needs SamplingParams and a pilot, got {show_value(params)}, {show_value(pilot)}"
            )
        ids = self._check_prompt(prompt_ids)
        if pilot.num_candidates and self.drafter is None:
            raise InputError(
                f"pilot {pilot.name!r} needs a drafter, and none is loaded; name one or use the pilot 'ar'"
            )
        vocab_size = self.runner.decoder.config.vocab_size
        if beyond := [token_id for token_id, _ in params.logit_bias if token_id >= vocab_size]:
            raise InputError(f"logit_bias names token {beyond[0]}, outside the vocabulary of {vocab_size}")
        return Sequence(
            request_id=next(self._ids) if number is None else number,
            prompt_ids=ids,
            params=params,
            pilot=pilot,
            eos_token_ids=self.eos_token_ids,
            max_total=self.context_length,
            detokenizer=IncrementalDetokenizer(self.tokenizer.decode, self.tokenizer.pieces),
            guide=None if params.guide is None else self.guides.make(params.guide),
        )

    def add(self, sequence: Sequence) -> None:
        """Enqueue a request; it is admitted when a slot is free."""
        self.scheduler.add(sequence)

    def find(self, request_id: int) -> Sequence | None:
        return self.scheduler.find(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.outbox)

    def step(self, *, may_admit: bool = True) -> list[Update]:
        """Advance everything by one prefill pass and one decoding step."""
        with on_device(self.runner.device):
            self.pipeline.pause()
            self._land()
            if may_admit:
                self._admit()
            self._prefill()
            self._launch()
            return self._report()

    def take_updates(self) -> list[Update]:
        """What `step` would have returned, had it not failed."""
        return self.outbox.take()

    def settle(self) -> None:
        """Land all steps that are in flight. What they brought is reported by the next `step`."""
        with on_device(self.runner.device):
            while self.pipeline.steps:
                self._land()

    def abort(self, request_id: int) -> Completion | None:
        """End a request now; its slot is free again. None when it has already left."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        sequence.abort()
        self._retire(sequence)
        return sequence.completion()

    def _land(self) -> None:
        """Finished requests leave at once, so that others get their slots; the text of the rest can wait."""
        if not self.pipeline.steps:
            return
        in_flight = self.pipeline.steps[0].sequences
        try:
            self.outbox.add(self.pipeline.land_next())
        except BaseException:
            self._drop(in_flight)
            raise
        finished = self.outbox.finished()
        self.outbox.write(finished)
        for sequence in finished:
            self._retire(sequence)

    def _admit(self) -> None:
        while self.scheduler.waiting and self.runner.cache.num_free:
            sequence = self.scheduler.next_waiting()
            sequence.slot = self.runner.cache.reserve() if self.prefixes is None else self.prefixes.reserve(sequence)

    def _prefill(self) -> None:
        if not self.scheduler.prefilling:
            return
        self.settle()
        chunks = self.scheduler.prefill_chunks()
        sequences = [sequence for sequence, _ in chunks]
        try:
            self._read_prompts(chunks)
        except BaseException:
            self._drop(sequences)
            raise
        self.pipeline.pause()
        self.outbox.add(sequences)

    def _launch(self) -> None:
        sequences = [sequence for sequence in self.scheduler.decoding if sequence.is_active]
        try:
            self.outbox.add(self.pipeline.launch(sequences, may_follow=not self.scheduler.prefilling))
        except BaseException:
            self._drop(sequences)
            raise

    def _report(self) -> list[Update]:
        self.outbox.add(sequence for sequence in self.scheduler.decoding if sequence.error)
        finished = self.outbox.finished()
        self.outbox.write()
        for sequence in finished:
            self._retire(sequence)
        return self.outbox.take()

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """A pass has failed: these requests leave, with all that are in flight. The device must be through before
        anybody uses their slots."""
        dropped = [*sequences, *self.pipeline.drop()]
        try:
            wait_for(self.runner.device)
        finally:
            for sequence in dropped:
                self._retire(sequence, is_whole=False)

    def _read_prompts(self, chunks: list[tuple[Sequence, list[int]]]) -> None:
        started = time.perf_counter()
        tap_layers = self.drafter.tap_layers if self.drafter else ()
        can_wait = {
            sequence.slot: sequence.pilot.rests(self._neighbours(sequence))
            for sequence, _ in chunks
            if sequence.pilot.num_candidates
        }

        def show(observations: list[Observation]) -> None:
            shown = [one._replace(can_wait=can_wait[one.slot]) for one in observations if one.slot in can_wait]
            if self.drafter and shown:
                self.drafter.observe(shown)

        prompts = [(sequence.slot, chunk) for sequence, chunk in chunks]
        result = self.runner.prefill(prompts, tap_layers, [sequence.params for sequence, _ in chunks], show)
        for row, (sequence, chunk) in enumerate(chunks):
            sequence.num_prefilled += len(chunk)
            if sequence.is_prefilled:
                with on_one_thread():
                    self._take_first_token(sequence, result, row)
                neighbours = self._neighbours(sequence)
                try:
                    sequence.memory = sequence.pilot.start(_prefill_state(sequence, result, row), neighbours)
                except Exception as error:
                    end_alone(sequence.pilot, [sequence], error)
                self.scheduler.start_decoding(sequence)
        seconds = time.perf_counter() - started
        for sequence, _ in chunks:
            sequence.prefill_seconds += seconds

    def _neighbours(self, sequence: Sequence) -> list[Any]:
        """Memories of the requests that its pilot decides for already."""
        return [one.memory for one in self.scheduler.decoding if one.pilot is sequence.pilot]

    def _take_first_token(self, sequence: Sequence, result: PassResult, row: int) -> None:
        try:
            token_id = _first_token(sequence, result, row)
        except BlockPilotError as error:  # of its guide
            sequence.fail(str(error))
            token_id = NO_TOKEN
        count = self.pipeline.loop.grow(sequence, [token_id])
        if count and sequence.params.logprobs is not None:
            sequence.scores = score_tokens(result.logits[row : row + 1], [token_id], sequence.params.logprobs)

    def _retire(self, sequence: Sequence, *, is_whole: bool = True) -> None:
        self.scheduler.remove(sequence)
        self.outbox.forget(sequence)
        if sequence.slot >= 0:
            if self.prefixes is not None and is_whole and sequence.error is None:
                self.prefixes.hold(sequence)
            self.runner.cache.free(sequence.slot)
            if self.drafter:
                self.drafter.forget(sequence.slot)
            sequence.slot = -1

    def _check_prompt(self, prompt_ids: Collection[int]) -> list[int]:
        ids = list(read_token_ids(prompt_ids, "prompt", least=-MAX_COUNT))
        if not ids:
            raise InputError("the prompt is empty: give at least one token")
        if len(ids) >= self.context_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens and the context holds {self.context_length}, "
                "answer included: shorten the prompt"
            )
        vocab_size = self.runner.decoder.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise InputError(f"the prompt holds token ids outside the vocabulary of {vocab_size}")
        return ids


def _first_token(sequence: Sequence, result: PassResult, row: int) -> int:
    """The one that the pass has found, or that follows from its logits."""
    position, logits = len(sequence.prompt_ids), result.logits[row : row + 1]
    if sequence.adjustment is not None:
        return choose_token(sequence.adjustment, logits[0], (), position)
    if result.best is not None and not sequence.params.is_filtered:
        return result.best[row]
    return int(choose_tokens(logits, sequence.params, [position]))


def _prefill_state(sequence: Sequence, result: PassResult, row: int) -> PrefillState | None:
    if not sequence.pilot.reads_prefill or result.hidden is None:
        return None
    logits = result.logits[row].float()
    return PrefillState(
        num_prompt_tokens=len(sequence.prompt_ids),
        probabilities=logits.softmax(dim=-1),
        hidden=result.hidden[row],
        logits=logits,
    )
