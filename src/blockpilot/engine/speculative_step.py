"""THE decode loop body. Every method, from plain decoding to adaptive trees, is this one step.

    choose   each request's pilot picks a draft size (0: plain decoding)
    draft    one batched drafter pass for all requests that draft
    select   the pilot picks the nodes to check: the draft tree
    verify   one target pass over all trees
    accept   walk each tree along the target's own tokens
    commit   the cache keeps the accepted path, the drafter sees what was kept, the answer grows

Requests in one step may differ in prompt length, draft size, tree shape, pilot and sampling.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Collection
from types import MappingProxyType
from typing import NamedTuple

from blockpilot.core.candidates import Candidates
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.records import StepRecord
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Drafter, DraftRequest, Observation
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.decoding.verification import Acceptance, accept
from blockpilot.engine.joint_step import JointFlight, JointStep
from blockpilot.engine.plain_step import PlainFlight, PlainRequest, PlainStep
from blockpilot.engine.runner import PassResult, TargetRunner
from blockpilot.engine.sequence import Sequence
from blockpilot.pilots.base import Outcome, PilotInputs
from blockpilot.pilots.batch import choose_sizes, select_trees

NOTHING: Mapping[Sequence, int] = MappingProxyType({})


class Carried(NamedTuple):
    """A step but for the answers' growth: what each request emits, what was checked for it, where the time went."""

    emitted_ids: Collection[Collection[int]]
    num_checked: Collection[int]
    draft_seconds: float
    verify_seconds: float
    pilot_seconds: float


class Flight(NamedTuple):
    """A step that has begun; `land` ends it."""

    sequences: Collection[Sequence]
    inputs: Collection[PilotInputs]
    sizes: Collection[int]
    started: float
    choice_seconds: float
    work: Carried | JointFlight | PlainFlight  # done, or on its way on a device

    @property
    def is_over(self) -> bool:
        return isinstance(self.work, Carried)


def begin(
    sequences: Collection[Sequence],
    runner: TargetRunner,
    drafter: Drafter | None,
    *,
    joint: JointStep | None,
    plain: PlainStep | None,
    since: float | None = None,
    chosen: Mapping[Sequence, int] = NOTHING,
) -> Flight:
    """With `joint`, a GPU goes from the draft to the accepted tokens without the host, where it can; with `plain`, from
    token to token. No other step may be on its way.

    `since` is when the step before had landed, if nothing but this has happened since. `chosen` are the sizes that
    pilots have chosen for this step before (`follow`).
    """
    started = time.perf_counter()
    inputs = _inputs(sequences, drafter)
    sizes = [chosen.get(one, 0) if given.num_remaining > 1 else 1 for one, given in zip(sequences, inputs, strict=True)]
    if 0 in sizes or len(sequences) == 1 < len(chosen):  # what a batch has chosen is not for one that is left alone
        sizes = _choose(sequences, inputs)
    choice_seconds = time.perf_counter() - started
    work: Carried | JointFlight | PlainFlight | None = None
    if plain is not None:
        work = _start_plainly(sequences, sizes, plain)
    if work is None and joint is not None:
        work = _start_jointly(sequences, inputs, sizes, joint)
    work = work or _carry_out(sequences, inputs, sizes, runner, drafter)
    return Flight(sequences, inputs, sizes, since or started, choice_seconds, work)


def follow(
    flight: Flight, drafter: Drafter | None, joint: JointStep | None, plain: PlainStep | None
) -> tuple[Flight | None, Mapping[Sequence, int]]:
    """Begin the step behind one that is on its way, of the same requests, before anybody knows what that one brings.

    Pilots decide with what they know. There is no such step where they decide otherwise than in the step before, where
    slots may not have the room, or where nobody is sure to need another; then `begin` gets the sizes they have chosen.
    Requests that end meanwhile get nothing of it.
    """
    work, sequences, inputs = flight.work, flight.sequences, list(flight.inputs)
    going = [index for index, sequence in enumerate(sequences) if sequence.is_active]
    if isinstance(work, Carried) or not any(sequences[index].num_remaining > flight.sizes[index] for index in going):
        return None, NOTHING
    positions: list[int | None] = [None] * len(sequences)
    chosen: Mapping[Sequence, int] = NOTHING
    if isinstance(work, JointFlight) or work.is_shown:
        active = [sequences[index] for index in going]
        known = _inputs(active, drafter)
        chosen = dict(zip(active, _choose(active, known), strict=True))
        for index, given in zip(going, known, strict=True):
            if chosen[sequences[index]] != flight.sizes[index] and given.num_remaining > 1:
                return None, chosen
            inputs[index], positions[index] = given, sequences[index].anchor_position
    behind: JointFlight | PlainFlight | None
    if isinstance(work, PlainFlight):
        assert plain is not None
        behind = plain.follow(work, len(going))
    else:
        assert joint is not None
        ahead = sequences[going[0]].pilot.ahead(inputs[going[0]])
        behind = None if ahead is None else joint.follow(work, ahead, positions)
    if behind is None:
        return None, chosen
    return flight._replace(inputs=inputs, work=behind, choice_seconds=0.0), NOTHING  # nobody has waited for the choice


def land(flight: Flight, joint: JointStep | None, plain: PlainStep | None) -> tuple[list[Sequence], float]:
    """Answers grow, but for their text (`Sequence.write`); which, and when the step was over.

    Requests that have ended or left meanwhile get nothing.
    """
    sequences, carried, landed = flight.sequences, flight.work, time.perf_counter()
    is_wanted = [sequence.is_active for sequence in sequences]
    if isinstance(carried, JointFlight):
        assert joint is not None
        joined = joint.land(carried, is_wanted)
        landed = joined.landed
        _learn(flight, carried.requests, joined.reports, is_wanted)
        num_checked = [int(report[0]) for report in joined.reports]
        carried = Carried(
            joined.emitted_ids, num_checked, joined.draft_seconds, joined.verify_seconds, joined.growth_seconds
        )
    elif isinstance(carried, PlainFlight):
        assert plain is not None
        decoded = plain.land(carried, is_wanted)
        landed = decoded.landed
        carried = Carried(decoded.emitted_ids, [1] * len(sequences), 0.0, decoded.verify_seconds, 0.0)
    pilot_seconds = flight.choice_seconds + carried.pilot_seconds
    seconds = landed - flight.started
    grown = []
    for index, (sequence, size) in enumerate(zip(sequences, flight.sizes, strict=True)):
        if is_wanted[index]:
            count = sequence.take(carried.emitted_ids[index])
            sequence.decode_seconds += seconds
            sequence.steps.append(
                StepRecord(  # in their order: naming them takes longer than the rest
                    size,
                    carried.num_checked[index],
                    count,
                    carried.draft_seconds,
                    carried.verify_seconds,
                    pilot_seconds,
                )
            )
            grown.append(sequence)
    return grown, landed


def _carry_out(
    sequences: Collection[Sequence],
    inputs: Collection[PilotInputs],
    sizes: Collection[int],
    runner: TargetRunner,
    drafter: Drafter | None,
) -> Carried:
    """Stage by stage; the host decides between them."""
    started = time.perf_counter()
    candidates = _draft(sequences, sizes, drafter)
    drafted = time.perf_counter()
    trees = _select(sequences, inputs, candidates)
    selected = time.perf_counter()
    result = runner.verify(
        [(sequence.slot, tree) for sequence, tree in zip(sequences, trees, strict=True)],
        drafter.tap_layers if drafter and any(sequence.pilot.num_candidates for sequence in sequences) else (),
        [sequence.params for sequence in sequences],
    )
    acceptances = _accept(sequences, trees, result)
    verified = time.perf_counter()
    kept = [acceptance.path for acceptance in acceptances]
    runner.keep([(sequence.slot, path) for sequence, path in zip(sequences, kept, strict=True)])
    _observe(sequences, acceptances, result, drafter)  # a GPU works on it while the host makes text of tokens
    return Carried(
        [acceptance.emitted_ids for acceptance in acceptances],
        [len(tree) for tree in trees],
        draft_seconds=drafted - started,
        verify_seconds=verified - selected,
        pilot_seconds=selected - drafted,
    )


def _start_plainly(sequences: Collection[Sequence], sizes: Collection[int], plain: PlainStep) -> PlainFlight | None:
    """On the device alone; None where somebody drafts or filters tokens, or where only some may draft later."""
    num_drafting = sum(one.pilot.num_candidates > 0 for one in sequences)
    if max(sizes) > 1 or num_drafting not in (0, len(sequences)) or (num_drafting and plain.drafter is None):
        return None
    if any(one.params.is_filtered for one in sequences) or not plain.can_run(len(sequences)):
        return None
    requests = [
        PlainRequest(sequence.slot, sequence.anchor_id, sequence.anchor_position, sequence.params.words)
        for sequence in sequences
    ]
    return plain.start(requests, is_shown=num_drafting > 0)


def _start_jointly(
    sequences: Collection[Sequence], inputs: Collection[PilotInputs], sizes: Collection[int], joint: JointStep
) -> JointFlight | None:
    """On the device alone; None where it must ask the host, or decodes plainly."""
    pilot = sequences[0].pilot
    ahead, team = pilot.ahead(inputs[0]), pilot.team
    if ahead is None or max(sizes) < 2 or any(one.pilot.team is not team for one in sequences):
        return None
    most_nodes, is_chain = min(ahead.num_nodes, MAX_TREE_NODES), ahead.is_chain
    requests = []
    for sequence, given, size in zip(sequences, inputs, sizes, strict=True):
        num_remaining = given.num_remaining
        if sequence.params.is_filtered or (size < 2 and num_remaining > 1):
            return None
        depth = (size if size < num_remaining else num_remaining) - 1  # deeper tokens cannot be emitted
        num_nodes = min(most_nodes, depth) if is_chain else most_nodes if depth else 0
        requests.append(_draft_request(sequence, max(size, 2), (num_nodes, depth)))
    num_tokens = 1 + max([request.limits[0] for request in requests])
    if not joint.can_run(len(requests), max(sizes), num_tokens):
        return None
    return joint.start(requests, ahead)


def _learn(
    flight: Flight,
    requests: Collection[DraftRequest],
    reports: Collection[Collection[float]],
    is_wanted: Collection[bool],
) -> None:
    pilot = flight.sequences[0].pilot
    if not pilot.learns:
        return
    outcomes = [
        Outcome(sequence.pilot, given, int(report[1]), report[2], report[3 : 3 + request.limits[1]])
        for sequence, given, request, report, is_own in zip(
            flight.sequences, flight.inputs, requests, reports, is_wanted, strict=True
        )
        if is_own and given.num_remaining > 1  # the others have drafted for nothing
    ]
    if outcomes:
        pilot.learn(outcomes)


def _inputs(sequences: Collection[Sequence], drafter: Drafter | None) -> list[PilotInputs]:
    largest, trained = (drafter.max_block_size, drafter.block_size) if drafter else (1, 1)
    return [
        sequence.pilot_inputs(batch_size=len(sequences), max_block_size=largest, trained_block_size=trained)
        for sequence in sequences
    ]


def _choose(sequences: Collection[Sequence], inputs: Collection[PilotInputs]) -> list[int]:
    """The pilots' block sizes within the drafter's limit; 1 means plain decoding, as always for the last token."""
    asked = [
        (sequence.pilot, given) for sequence, given in zip(sequences, inputs, strict=True) if given.num_remaining > 1
    ]
    sizes = iter(choose_sizes(asked))
    return [max(1, min(next(sizes), given.max_block_size)) if given.num_remaining > 1 else 1 for given in inputs]


def _draft(sequences: Collection[Sequence], sizes: Collection[int], drafter: Drafter | None) -> list[Candidates | None]:
    requests = [_draft_request(sequence, size) for sequence, size in zip(sequences, sizes, strict=True) if size > 1]
    if drafter is None or not requests:
        return [None] * len(sequences)
    proposals = iter(drafter.propose(requests))
    return [next(proposals) if size > 1 else None for size in sizes]


def _draft_request(sequence: Sequence, block_size: int, limits: tuple[int, int] = (0, 0)) -> DraftRequest:
    return DraftRequest(  # in their order, as `Sequence.pilot_inputs` has it
        sequence.slot,
        sequence.anchor_id,
        sequence.anchor_position,
        block_size,
        sequence.pilot.num_candidates,
        sequence.params,
        limits,
    )


def _select(
    sequences: Collection[Sequence], inputs: Collection[PilotInputs], candidates: Collection[Candidates | None]
) -> list[DraftTree]:
    """The trees that pilots select; of requests that have not drafted, the anchor alone."""
    drafted = [
        (sequence.pilot, given, found, sequence.anchor_id)
        for sequence, given, found in zip(sequences, inputs, candidates, strict=True)
        if found is not None
    ]
    selected = select_trees(drafted)
    if len(selected) == len(sequences):
        return selected
    trees = iter(selected)
    return [
        DraftTree.chain(sequence.anchor_id, []) if found is None else next(trees)
        for sequence, found in zip(sequences, candidates, strict=True)
    ]


def _accept(sequences: Collection[Sequence], trees: Collection[DraftTree], result: PassResult) -> list[Acceptance]:
    """The target's token after every node, then the walk."""
    is_greedy = all(sequence.params.is_greedy for sequence in sequences)
    has_sampled = result.best is not None
    best = result.best_ids() if is_greedy or has_sampled else []
    acceptances = []
    for sequence, tree, start in zip(sequences, trees, result.row_starts, strict=True):
        rows = slice(start, start + len(tree))
        if is_greedy or (has_sampled and not sequence.params.is_filtered):
            target_ids = best[rows]
        else:
            positions = [sequence.anchor_position + depth + 1 for depth in tree.depths]
            target_ids = choose_tokens(result.logits[rows], sequence.params, positions).tolist()
        acceptances.append(accept(tree, target_ids))
    return acceptances


def _observe(
    sequences: Collection[Sequence],
    acceptances: Collection[Acceptance],
    result: PassResult,
    drafter: Drafter | None,
) -> None:
    """Tell the drafter of the tokens whose keys and values were kept: the old anchor and the accepted nodes."""
    if drafter is None:
        return
    observations = []
    for sequence, (path, emitted_ids), start in zip(sequences, acceptances, result.row_starts, strict=True):
        if sequence.pilot.num_candidates:
            token_ids = (sequence.anchor_id, *emitted_ids[:-1])
            observations.append(Observation(sequence.slot, token_ids, result.taps, [start + node for node in path]))
    if observations:
        drafter.observe(observations)
