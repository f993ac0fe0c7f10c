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
from collections.abc import Sequence as Collection

from blockpilot.core.candidates import Candidates
from blockpilot.core.records import StepRecord
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Drafter, DraftRequest, Observation
from blockpilot.decoding.sampling import choose_tokens
from blockpilot.decoding.verification import Acceptance, accept
from blockpilot.engine.runner import PassResult, TargetRunner
from blockpilot.engine.sequence import Sequence
from blockpilot.pilots.base import PilotInputs
from blockpilot.pilots.batch import choose_sizes, select_trees


def speculative_step(sequences: Collection[Sequence], runner: TargetRunner, drafter: Drafter | None) -> None:
    """Advance every sequence by one step; finished ones carry a finish_reason afterwards."""
    started = time.perf_counter()
    inputs = _inputs(sequences, drafter)
    sizes = _choose(sequences, inputs)
    chosen = time.perf_counter()
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
    counts = [
        sequence.commit(acceptance.emitted_ids) for sequence, acceptance in zip(sequences, acceptances, strict=True)
    ]
    seconds = time.perf_counter() - started
    draft_seconds, verify_seconds = drafted - chosen, verified - selected
    pilot_seconds = (chosen - started) + (selected - drafted)
    for sequence, size, tree, count in zip(sequences, sizes, trees, counts, strict=True):
        sequence.decode_seconds += seconds
        sequence.steps.append(
            StepRecord(
                block_size=size,
                verify_size=len(tree),
                emitted=count,
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                pilot_seconds=pilot_seconds,
            )
        )


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
    requests = [
        DraftRequest(
            slot=sequence.slot,
            anchor_id=sequence.anchor_id,
            position=sequence.anchor_position,
            block_size=size,
            num_candidates=sequence.pilot.num_candidates,
            params=sequence.params,
        )
        for sequence, size in zip(sequences, sizes, strict=True)
        if size > 1
    ]
    if drafter is None or not requests:
        return [None] * len(sequences)
    proposals = iter(drafter.propose(requests))
    return [next(proposals) if size > 1 else None for size in sizes]


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
    """The target's token after every node, then the walk. The only place that waits for the device."""
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
