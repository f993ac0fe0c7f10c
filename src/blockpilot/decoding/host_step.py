"""A decoding step on the host, stage by stage.

    draft    one batched drafter pass for all requests that draft
    select   their pilots pick the nodes to check: the draft trees
    verify   one target pass over all trees
    accept   walk each tree along the target's own tokens
    keep     the cache keeps the accepted paths, and the drafter sees what was kept

Requests of one step may differ in prompt length, draft size, tree shape, pilot and sampling.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import on_one_thread
from blockpilot.core.draft import NO_DRAFT, HostDraft, node_probabilities
from blockpilot.core.errors import InputError, describe_failure
from blockpilot.core.records import StepTree, TokenScore
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.adjusting import accept_adjusted, score_tokens
from blockpilot.decoding.drafter import Drafter, Observation
from blockpilot.decoding.sampling import NO_TOKEN, choose_tokens
from blockpilot.decoding.step import Landed, Report, StepRequest
from blockpilot.decoding.target import PassResult, TargetRunner
from blockpilot.decoding.verification import Acceptance, accept
from blockpilot.pilots.base import Drafted, Selection

NOTHING_TO_COMPUTE = nullcontext()  # the pass has found the tokens itself


class HostExecutor:
    def __init__(self, runner: TargetRunner, drafter: Drafter | None) -> None:
        self.runner, self.drafter = runner, drafter

    def begin(self, requests: Sequence[StepRequest]) -> Landed:
        """The whole step: it has landed when this returns."""
        started = time.perf_counter()
        drafts = self._draft(requests)
        drafted = time.perf_counter()
        selections, failures = _select(requests, drafts)
        selected = time.perf_counter()
        selections = _prune(requests, selections, failures)
        trees = [selection.tree for selection in selections]
        is_observed = self.drafter is not None and any(request.pilot.num_candidates for request in requests)
        result = self.runner.verify(
            [(request.slot, tree) for request, tree in zip(requests, trees, strict=True)],
            self.drafter.tap_layers if self.drafter and is_observed else (),
            [request.params for request in requests],
        )
        with on_one_thread() if result.best is None or len(result.logits) else NOTHING_TO_COMPUTE:
            acceptances = _accept(requests, trees, result, failures)
            scores = _score(requests, acceptances, result)
        kept = _keep_trees(requests, drafts, trees, acceptances)
        verified = time.perf_counter()
        self.runner.keep([(one.slot, found.path) for one, found in zip(requests, acceptances, strict=True)])
        if is_observed:
            self._observe(requests, acceptances, result)  # a GPU works on it while the host makes text of tokens
        return Landed(
            [acceptance.emitted_ids for acceptance in acceptances],
            [Report(len(tree), tree.max_depth, promised, head) for tree, promised, head in selections],
            time=time.perf_counter(),
            draft_seconds=drafted - started,
            select_seconds=selected - drafted,
            verify_seconds=verified - selected,
            scores=scores,
            trees=kept,
            failures=failures,
        )

    def follow(self, ticket: Landed, positions: Sequence[int | None]) -> None:
        return None

    def land(self, ticket: Landed, is_wanted: Sequence[bool]) -> Landed:
        return ticket

    def _draft(self, requests: Sequence[StepRequest]) -> list[HostDraft | None]:
        asked = [request.draft_request(request.block_size) for request in requests if request.block_size > 1]
        if self.drafter is None or not asked:
            return [None] * len(requests)
        proposals = iter(self.drafter.propose(asked))
        drafts = (next(proposals) if request.block_size > 1 else None for request in requests)
        return [draft if draft is None or draft.is_sound else None for draft in drafts]

    def _observe(self, requests: Sequence[StepRequest], acceptances: Sequence[Acceptance], result: PassResult) -> None:
        """Tell the drafter of the tokens whose keys and values were kept: the old anchor and the accepted nodes."""
        observations = []
        for request, (path, emitted_ids), start in zip(requests, acceptances, result.row_starts, strict=True):
            if request.pilot.num_candidates:
                token_ids = (request.anchor_id, *emitted_ids[:-1])
                observations.append(Observation(request.slot, token_ids, result.taps, [start + node for node in path]))
        if self.drafter:
            self.drafter.observe(observations)


def _select(
    requests: Sequence[StepRequest], drafts: Sequence[HostDraft | None]
) -> tuple[list[Selection], dict[int, str]]:
    """What pilots select; of requests that have nothing to check, or whose pilot fails, the anchor alone."""
    failures: dict[int, str] = {}
    found = [Selection(DraftTree.chain(request.anchor_id, [])) for request in requests]
    groups: dict[int, list[int]] = {}  # places of requests by their pilot
    for place, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        if draft is not None or request.choice.is_copied:
            groups.setdefault(id(request.pilot), []).append(place)
    for places in groups.values():
        drafted = [
            Drafted(one.memory, one.inputs, one.choice, draft or NO_DRAFT, one.anchor_id)
            for one, draft in ((requests[place], drafts[place]) for place in places)
        ]
        pilot = requests[places[0]].pilot
        try:
            for place, selection in zip(places, pilot.select(drafted), strict=True):
                found[place] = _check(selection, requests[place])
        except Exception as error:  # a pilot that fails ends its own requests alone
            failures |= dict.fromkeys(places, describe_failure(f"pilot {pilot.name!r} failed", error))
    return found, failures


def _check(selection: Selection, request: StepRequest) -> Selection:
    """What a check takes; nodes deeper than the answer may still reach could not be emitted."""
    if len(selection.tree) > MAX_TREE_NODES + 1:
        raise InputError(f"pilot {request.pilot.name!r} selected more than the {MAX_TREE_NODES} nodes of one check")
    tree = selection.tree.up_to(request.inputs.num_remaining - 1)
    return selection if tree is selection.tree else selection._replace(tree=tree)


def _prune(requests: Sequence[StepRequest], selections: list[Selection], failures: dict[int, str]) -> list[Selection]:
    """Without nodes that a request's guide forbids; plain decoding stays plain."""
    for place, request in enumerate(requests):
        if request.adjustment is not None and request.pilot.num_candidates:
            try:
                tree = request.adjustment.prune(selections[place].tree, max_depth=request.inputs.num_remaining - 1)
                selections[place] = selections[place]._replace(tree=tree)
            except Exception as error:
                failures[place] = describe_failure("the guide failed", error)
    return selections


def _accept(
    requests: Sequence[StepRequest], trees: Sequence[DraftTree], result: PassResult, failures: dict[int, str]
) -> list[Acceptance]:
    """The target's token after every node, then the walk. A guide that fails ends its own request alone."""
    is_greedy = all(request.params.is_greedy and request.adjustment is None for request in requests)
    has_sampled = result.best is not None
    best = result.best_ids() if is_greedy or has_sampled else []
    acceptances = []
    for place, (request, tree, start) in enumerate(zip(requests, trees, result.row_starts, strict=True)):
        rows = slice(start, start + len(tree))
        if request.adjustment is not None:
            try:
                found = accept_adjusted(request.adjustment, tree, result.logits[rows], request.position)
            except Exception as error:
                failures[place] = describe_failure("the guide failed", error)
                found = Acceptance((0,), (NO_TOKEN,))
            acceptances.append(found)
            continue
        if is_greedy or (has_sampled and not request.params.is_filtered):
            target_ids = best[rows]
        else:
            positions = [request.position + depth + 1 for depth in tree.depths]
            target_ids = choose_tokens(result.logits[rows], request.params, positions).tolist()
        acceptances.append(accept(tree, target_ids))
    return acceptances


def _score(
    requests: Sequence[StepRequest], acceptances: Sequence[Acceptance], result: PassResult
) -> dict[int, list[TokenScore]]:
    """Log-probabilities of emitted tokens, for the requests that want them."""
    found = {}
    for place, (request, (path, emitted_ids), start) in enumerate(
        zip(requests, acceptances, result.row_starts, strict=True)
    ):
        if request.params.logprobs is not None and emitted_ids[-1] != NO_TOKEN:
            rows = torch.tensor([start + node for node in path], device=result.logits.device)
            found[place] = score_tokens(result.logits[rows], emitted_ids, request.params.logprobs)
    return found


def _keep_trees(
    requests: Sequence[StepRequest],
    drafts: Sequence[HostDraft | None],
    trees: Sequence[DraftTree],
    acceptances: Sequence[Acceptance],
) -> dict[int, StepTree]:
    """What was checked, for the requests that want to see it."""
    found = {}
    for place, (request, draft, tree) in enumerate(zip(requests, drafts, trees, strict=True)):
        if request.params.keeps_trees:
            path, emitted_ids = acceptances[place]
            probabilities = [None] * len(tree) if draft is None else node_probabilities(draft, tree)
            found[place] = StepTree(tree.token_ids, tree.parents, tuple(probabilities), path, emitted_ids[-1])
    return found
