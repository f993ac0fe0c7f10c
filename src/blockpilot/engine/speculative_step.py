"""THE decode loop body. Every method, from plain decoding to adaptive trees, is this one step.

    begin    each request's pilot chooses, and an executor takes the step: on the host it has landed at once, on a
             device it is in flight
    follow   the step behind one in flight, of the same requests, before anybody knows what that one brings
    land     answers grow by the emitted tokens, and pilots learn what came of their choices

Executors draft, check and accept (`decoding/host_step.py`, `gpu/step.py`). Losslessness is proven here once.
"""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from blockpilot.core.errors import describe_failure
from blockpilot.core.records import StepRecord
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.ngram import NgramDrafter
from blockpilot.decoding.sampling import NO_TOKEN
from blockpilot.decoding.step import Landed, Report, StepExecutor, StepRequest
from blockpilot.engine.sequence import Sequence
from blockpilot.pilots.base import PLAIN, Asked, Choice, Outcome, Pilot, PilotInputs
from blockpilot.pilots.live_costs import LiveCosts, MeasuredStep

Choices = Mapping[Sequence, Choice]
NO_CHOICES: Choices = MappingProxyType({})


@dataclass(frozen=True)
class StepInFlight:
    executor: StepExecutor
    ticket: Any  # the executor's own
    sequences: Collection[Sequence]
    requests: Collection[StepRequest]
    started: float  # or when the step before it landed
    choose_seconds: float  # that somebody has waited for


@dataclass
class DecodeLoop:
    executors: Collection[StepExecutor]  # the first that can takes a step; the host's, the last, always can
    drafter: Drafter | None
    buckets: tuple[int, ...]  # of the target's checks
    target_name: str = "the target"
    live_costs: LiveCosts | None = None  # told what steps take, where pilots follow the machine

    def begin(self, sequences: Collection[Sequence], chosen: Choices, started: float) -> StepInFlight:
        """`chosen` are choices that pilots have made for this step already."""
        asked = time.perf_counter()
        inputs = self._inputs(sequences)
        if len(sequences) == 1 < len(chosen):  # what a batch has chosen is not for one that is left alone
            chosen = NO_CHOICES
        choices = _complete(sequences, inputs, chosen)
        choose_seconds = time.perf_counter() - asked
        requests = _requests(sequences, inputs, choices)
        for executor in self.executors:
            ticket = executor.begin(requests)
            if ticket is not None:
                return StepInFlight(executor, ticket, sequences, requests, started, choose_seconds)
        raise AssertionError("the last executor takes every step")

    def follow(self, step: StepInFlight) -> tuple[StepInFlight | None, Choices]:
        """Enqueue the step behind this one. Pilots choose before this one has landed.

        None where a pilot changes its choice, where slots may run out of room, or where no request is sure to need
        another step: then the choices are for `begin`. A request that finishes meanwhile stays in the batch; its
        output is discarded.
        """
        active = [place for place, sequence in enumerate(step.sequences) if sequence.is_active]
        sequences = [step.sequences[place] for place in active]
        if not any(step.sequences[place].num_remaining > step.requests[place].block_size for place in active):
            return None, NO_CHOICES
        requests = list(step.requests)
        chosen = NO_CHOICES
        if any(sequence.pilot.num_candidates for sequence in sequences):  # others have nothing to choose
            inputs = self._inputs(sequences)
            choices = _complete(sequences, inputs, NO_CHOICES)
            chosen = dict(zip(sequences, choices, strict=True))
            for place, request in zip(active, _requests(sequences, inputs, choices), strict=True):
                if request.choice != step.requests[place].choice and request.inputs.num_remaining > 1:
                    return None, chosen
                requests[place] = request
        positions = [sequence.anchor_position if sequence.is_active else None for sequence in step.sequences]
        ticket = step.executor.follow(step.ticket, positions)
        if ticket is None:
            return None, chosen
        return StepInFlight(step.executor, ticket, step.sequences, requests, step.started, 0.0), NO_CHOICES

    def land(self, step: StepInFlight) -> tuple[list[Sequence], float]:
        """Answers grow, but for their text (`Sequence.write`); which, and when the step was over.

        Requests that have finished or left meanwhile get nothing.
        """
        is_wanted = [sequence.is_active for sequence in step.sequences]
        landed = step.executor.land(step.ticket, is_wanted)
        grown: list[tuple[int, Sequence, StepRequest, Report, int]] = []
        outcomes: dict[int, list[Outcome]] = {}  # by pilot
        for place, (sequence, request) in enumerate(zip(step.sequences, step.requests, strict=True)):
            if is_wanted[place]:
                report = landed.reports[place]
                emitted, failure = landed.emitted_ids[place], landed.failures.get(place)
                if failure is not None and emitted[-1] == NO_TOKEN:
                    emitted = emitted[:-1]
                count = self.grow(sequence, emitted)
                sequence.scores += landed.scores.get(place, ())[:count]
                if failure is not None:
                    sequence.fail(failure)
                grown.append((place, sequence, request, report, count))
                if request.block_size > 1 and sequence.is_active and sequence.guide is None:  # guides change trees
                    outcomes.setdefault(id(request.pilot), []).append(_outcome(sequence, request, report, count))
        started = time.perf_counter()
        if self.live_costs is not None:
            self.live_costs.note(_measured(step, landed))
        for _, sequence, *_ in grown:
            if found := outcomes.pop(id(sequence.pilot), None):
                try:
                    sequence.pilot.learn(found)
                except Exception as error:
                    end_alone(sequence.pilot, [one for _, one, *_ in grown if one.pilot is sequence.pilot], error)
        is_waiting = step.executor is self.executors[-1]  # a device works on the next step meanwhile
        learn_seconds = time.perf_counter() - started if is_waiting else 0.0
        seconds = landed.time - step.started + learn_seconds
        pilot_seconds = step.choose_seconds + landed.select_seconds + learn_seconds
        for place, sequence, request, report, count in grown:
            sequence.decode_seconds += seconds
            sequence.steps.append(
                StepRecord(  # in their order: naming them takes longer than the rest
                    request.block_size,
                    report.verify_size,
                    count,
                    landed.draft_seconds,
                    landed.verify_seconds,
                    pilot_seconds,
                    landed.trees.get(place),
                    report.promised,
                )
            )
        return [sequence for _, sequence, *_ in grown], landed.time

    def grow(self, sequence: Sequence, token_ids: Collection[int]) -> int:
        """Let an answer take tokens; returns how many. The last may be one that the target could not choose."""
        if not token_ids or token_ids[-1] != NO_TOKEN:
            return sequence.take(token_ids)
        count = sequence.take(token_ids[:-1])
        if sequence.finish_reason is None:
            place = len(sequence.output_ids) + 1
            sequence.fail(
                f"{self.target_name} gives no finite scores for token {place} of the answer: its weights are damaged, "
                "or numbers outgrow the dtype (try --dtype float32)"
            )
        return count

    def _inputs(self, sequences: Collection[Sequence]) -> list[PilotInputs]:
        drafter = self.drafter
        largest, trained = (drafter.max_block_size, drafter.block_size) if drafter else (1, 1)
        inputs = [sequence.pilot_inputs(len(sequences), largest, trained, self.buckets) for sequence in sequences]
        if isinstance(drafter, NgramDrafter):  # it would draft the copies again that a pilot has read
            inputs = [
                given._replace(max_block_size=1) if one.reads_copies(self.buckets) else given
                for one, given in zip(sequences, inputs, strict=True)
            ]
        return inputs


def end_alone(pilot: Pilot, sequences: Iterable[Sequence], error: Exception) -> None:
    """A pilot that fails ends its own requests, and nobody else's."""
    reason = describe_failure(f"pilot {pilot.name!r} failed", error)
    for sequence in sequences:
        sequence.fail(reason)


def _complete(sequences: Collection[Sequence], inputs: Collection[PilotInputs], chosen: Choices) -> list[Choice]:
    """Each request's choice. Pilots are asked for all of their requests at once, and for none twice; the last token of
    an answer needs no draft, and nobody is asked."""
    found = [chosen.get(one, PLAIN) for one in sequences]
    groups: dict[int, list[int]] = {}  # places of requests by their pilot
    for place, (sequence, given) in enumerate(zip(sequences, inputs, strict=True)):
        if given.num_remaining <= 1:
            found[place] = PLAIN
        elif sequence not in chosen:
            groups.setdefault(id(sequence.pilot), []).append(place)
    for places in groups.values():
        asked = [Asked(sequences[place].memory, inputs[place]) for place in places]
        pilot = sequences[places[0]].pilot
        try:
            for place, choice in zip(places, pilot.choose(asked), strict=True):
                found[place] = choice
        except Exception as error:
            end_alone(pilot, [sequences[place] for place in places], error)
    return found


def _requests(
    sequences: Collection[Sequence], inputs: Collection[PilotInputs], choices: Collection[Choice]
) -> list[StepRequest]:
    return [
        StepRequest(one.slot, one.anchor_id, one.params, one.pilot, one.memory, given, choice, one.adjustment)
        for one, given, choice in zip(sequences, inputs, choices, strict=True)
    ]


def _measured(step: StepInFlight, landed: Landed) -> MeasuredStep:
    """A step on the host, as `LiveCosts` takes it; profiles count what the pilot does behind a draft to the check."""
    drafts = [request.block_size for request in step.requests if request.block_size > 1]
    checks = [report.verify_size for report in landed.reports]
    context = sum(request.inputs.context_length for request in step.requests) // len(checks)
    check_ms = 1e3 * (landed.select_seconds + landed.verify_seconds)
    return MeasuredStep(drafts, checks, context, 1e3 * landed.draft_seconds, check_ms)


def _outcome(sequence: Sequence, request: StepRequest, report: Report, emitted: int) -> Outcome:
    return Outcome(sequence.memory, request.inputs, report.depth, report.promised, report.head, emitted)
