"""A decoding step on a device: draft, trees, check and acceptance in one go, and the next step behind it.

Where a pilot's choice says before the draft what to check, nothing in a step needs the host. Trees grow on the device,
straight into the plan of the check; acceptance writes the plan of the next draft. So step n + 1 can be enqueued before
the host has read step n (`follow`), and the device never waits for the host. A plain step is the same without a draft:
a tree of one node, whose acceptance writes the plan of the next check.

    drafted   draft -> grow -> check -> accept -> keep     the host reads what `accept` leaves
    plain                      check -> accept -> keep

Each arrow is a recorded graph behind another. Steps that cannot go this way take the host's (`decoding/host_step.py`);
both decide alike, up to the rounding of paths.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.step import Landed, Report, StepRequest
from blockpilot.gpu.buckets import REQUESTS, round_up
from blockpilot.gpu.device import Stopwatch, capture, graph_pool
from blockpilot.gpu.dflash import DraftPass, GpuDFlashDrafter
from blockpilot.gpu.eagle3 import GpuEagle3Drafter
from blockpilot.gpu.interface import REPORT, AcceptedRows, CheckedTrees, TreeRules
from blockpilot.gpu.plan import PassPlan
from blockpilot.gpu.target import CheckPass, GpuTargetRunner
from blockpilot.pilots.base import Choice, Pilot
from blockpilot.pilots.calibration import Calibrations
from blockpilot.pilots.growth import MAX_WIDTH

GrowthKey = tuple[bool, Calibrations | None]  # how nodes are chosen: whether as a chain, and by which calibrations


@dataclass(eq=False)
class Results:
    """Where a step leaves what the host reads. A recorded step has two: while one is read, the other may be filled."""

    report: Tensor  # [R, REPORT], on the host
    accepted: Tensor  # [R, 1 + m], on the host
    watch: Stopwatch
    accept: Callable[[], None] = field(init=False)
    grow: dict[GrowthKey, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_ids, self.reported = self.accepted.numpy(), self.report.numpy()


@dataclass(eq=False)
class KeepStage:
    """What follows acceptance, and is not waited for: accepted rows move to their places, and the drafter sees them."""

    kept: AcceptedRows
    run: Callable[[], None] | None = None


@dataclass(eq=False)
class RecordedStep:
    """All graphs of a step, of R requests."""

    draft: DraftPass | None  # None: a plain step
    check: CheckPass
    keep: KeepStage
    is_observed: bool  # whether the drafter sees what is kept
    parents: Tensor  # [R, n]
    results: deque[Results] = field(default_factory=deque)  # the next step's first

    @property
    def plan(self) -> PassPlan:
        """That of the step's first pass, which acceptance writes for the next step."""
        return self.check.plan if self.draft is None else self.draft.plan

    def launch(self, growth: GrowthKey) -> Results:
        found = self.results[0]
        self.results.rotate()
        watch = found.watch
        watch.mark(0)
        if self.draft is not None:
            self.draft.run()
            watch.mark(1)
            found.grow[growth]()
            watch.mark(2)
        self.check.run()
        found.accept()
        watch.mark(watch.last)
        if self.keep.run is not None:
            self.keep.run()
        return found


class Ticket(NamedTuple):
    """A step in flight."""

    requests: Sequence[StepRequest]  # as they were when `begin` enqueued the first of these steps
    limits: Sequence[tuple[int, int]]  # nodes and depth of each tree
    step: RecordedStep
    growth: GrowthKey
    results: Results
    reach: Sequence[int]  # where each anchor may stand at most


class DeviceExecutor:
    def __init__(self, runner: GpuTargetRunner, drafter: Drafter | None) -> None:
        """Other drafters than DFlash draft on the host's way."""
        self.runner, self.device = runner, runner.device
        self.bound = drafter if isinstance(drafter, GpuDFlashDrafter | GpuEagle3Drafter) else None
        can_draft = isinstance(drafter, GpuDFlashDrafter) and drafter.max_width <= MAX_WIDTH
        self.drafter = drafter if can_draft and isinstance(drafter, GpuDFlashDrafter) else None
        if self.bound is not None:
            self.bound.bind(runner.taps(self.bound.tap_layers))
        self._kernels = runner.fused.layers.kernels
        self._pool = graph_pool(self.device)
        self._steps: dict[tuple[DraftPass | None, CheckPass], RecordedStep] = {}
        self._keep_stages: dict[DraftPass, KeepStage] = {}
        self._weights: dict[Calibrations, Tensor] = {}

    def prepare(self, num_requests: int, pilot: Pilot | None) -> None:
        """Record all passes and plain steps of that many requests, and the steps that a pilot may choose."""
        runner, drafter = self.runner, self.drafter
        options = () if pilot is None or drafter is None else pilot.options(drafter.block_size)
        for can_branch in {not choice.is_chain for choice in options} or (False, True):
            runner.prepare(num_requests, self.bound.tap_layers if self.bound else (), can_branch=can_branch)
        if self.bound is not None:
            self.bound.prepare(num_requests)
        if runner.can_run(num_requests, 1):
            for tap_layers in {(), tuple(drafter.tap_layers)} if drafter else {()}:
                for check in runner.find_passes(num_requests, 1, tap_layers, can_branch=False):
                    self._find_step(None, check)
        for choice in options:
            if pilot is not None and drafter is not None and drafter.can_run(num_requests, choice.draft_size):
                self._prepare_choice(num_requests, choice, pilot.num_candidates, drafter)

    def _prepare_choice(
        self, num_requests: int, choice: Choice, num_candidates: int, drafter: GpuDFlashDrafter
    ) -> None:
        drafts = drafter.find_passes(num_requests, choice.draft_size, num_candidates)
        for count in _check_sizes(choice, self.runner.buckets):
            if self.runner.can_run(num_requests, count):
                can_branch = not choice.is_chain
                checks = self.runner.find_passes(num_requests, count, drafter.tap_layers, can_branch=can_branch)
                for draft, check in zip(drafts, checks, strict=False):  # by context
                    self._find_growth(self._find_step(draft, check), choice)

    def begin(self, requests: Sequence[StepRequest]) -> Ticket | None:
        if any(request.params.needs_host for request in requests):
            return None
        is_plain = all(request.block_size == 1 for request in requests)
        return self._begin_plain(requests) if is_plain else self._begin_drafted(requests)

    def follow(self, ticket: Ticket, positions: Sequence[int | None]) -> Ticket | None:
        """A request that has finished keeps its row for as long as there is room; its output is discarded."""
        step, plan = ticket.step, ticket.step.plan
        if round_up(len(positions) - positions.count(None), REQUESTS) < plan.num_requests:
            return None
        reach = [
            request.block_size + (last if now is None else now)
            for request, now, last in zip(ticket.requests, positions, ticket.reach, strict=True)
        ]
        farthest, check = max(reach), step.check.plan
        capacity = self.runner.cache.capacity
        if step.is_observed and self.drafter is not None:
            capacity = min(capacity, self.drafter.cache.capacity)
        if farthest > min(plan.inputs.context, check.inputs.context):
            return None
        if farthest + max(plan.count, check.count) > capacity:
            return None
        return ticket._replace(results=step.launch(ticket.growth), reach=reach)

    def land(self, ticket: Ticket, is_wanted: Sequence[bool]) -> Landed:
        requests, results, watch = ticket.requests, ticket.results, ticket.results.watch
        watch.wait(watch.last)
        landed = time.perf_counter()
        emitted = []
        keep = self.runner.cache.extend
        observe = self.drafter.cache.extend if self.drafter is not None and ticket.step.is_observed else None
        accepted = results.accepted_ids[: len(requests)].tolist()
        for request, row, is_kept in zip(requests, accepted, is_wanted, strict=True):
            count = row[0]
            emitted.append(row[1 : count + 1])
            if is_kept:
                keep(request.slot, count)
                if observe is not None:
                    observe(request.slot, count)
        *before, verify_seconds = watch.seconds()
        draft_seconds, select_seconds = before or (0.0, 0.0)
        reports = [Report(1)] * len(requests) if ticket.step.draft is None else _read_reports(ticket)
        return Landed(emitted, reports, landed, draft_seconds, select_seconds, verify_seconds)

    def _begin_plain(self, requests: Sequence[StepRequest]) -> Ticket | None:
        """None where only some may draft later, or where the drafter cannot see the tokens on the way."""
        num_drafting = sum(request.pilot.num_candidates > 0 for request in requests)
        if num_drafting not in (0, len(requests)) or (num_drafting and self.drafter is None):
            return None
        if not self.runner.can_run(len(requests), 1):
            return None
        cache, slots = self.runner.cache, [request.slot for request in requests]
        for slot in slots:
            cache.append(slot, 1)
        tap_layers = self.drafter.tap_layers if num_drafting and self.drafter else ()
        check = self.runner.find_pass(slots, 1, tap_layers, can_branch=False)
        step = self._find_step(None, check)
        trees = [(request.slot, DraftTree.chain(request.anchor_id, [])) for request in requests]
        check.plan.write_trees(trees, cache.lengths, [request.params.words for request in requests])
        growth: GrowthKey = (False, None)
        reach = [request.position for request in requests]
        return Ticket(requests, [(0, 0)] * len(requests), step, growth, step.launch(growth), reach)

    def _begin_drafted(self, requests: Sequence[StepRequest]) -> Ticket | None:
        """None where a pilot must see the draft, where not all draft, or where they choose nodes in different ways."""
        drafter, choices = self.drafter, [request.choice for request in requests if request.block_size > 1]
        ways = {(choice.is_chain, choice.calibrations) for choice in choices}
        if drafter is None or len(ways) > 1 or any(choice.num_nodes is None for choice in choices):
            return None
        if any(request.block_size == 1 and request.inputs.num_remaining > 1 for request in requests):
            return None
        limits = [_tree_limits(request) for request in requests]
        num_tokens = 1 + max([num_nodes for num_nodes, _ in limits])
        largest = max([request.block_size for request in requests])
        if not drafter.can_run(len(requests), largest) or not self.runner.can_run(len(requests), num_tokens):
            return None
        drafts = [one.draft_request(max(one.block_size, 2), limit) for one, limit in zip(requests, limits, strict=True)]
        slots = [request.slot for request in requests]
        draft = drafter.find_pass(drafts)
        check = self.runner.find_pass(slots, num_tokens, drafter.tap_layers, can_branch=not choices[0].is_chain)
        step = self._find_step(draft, check)
        growth = self._find_growth(step, choices[0])
        drafter.write(draft, drafts)
        for slot in slots:
            self.runner.cache.append(slot, num_tokens)
        check.plan.place(slots, self.runner.cache.lengths, [request.params.words for request in requests])
        return Ticket(requests, limits, step, growth, step.launch(growth), [one.position for one in drafts])

    def _find_step(self, draft: DraftPass | None, check: CheckPass) -> RecordedStep:
        key = (draft, check)
        if key not in self._steps:
            self._steps[key] = self._record_step(draft, check)
        return self._steps[key]

    @torch.inference_mode()
    def _record_step(self, draft: DraftPass | None, check: CheckPass) -> RecordedStep:
        plan = check.plan if draft is None else draft.plan
        keep = self._record_keep(None, check) if draft is None else self._find_keep(draft, check)
        parents = self._on_device(plan.num_requests, check.plan.count) - 1
        is_observed = self.drafter is not None and check.taps is not None
        step = RecordedStep(draft, check, keep, is_observed, parents)
        step.results.extend(self._record_results(step) for _ in range(2))
        return step

    def _find_keep(self, draft: DraftPass, check: CheckPass) -> KeepStage:
        """One per draft pass: all checks leave their taps in the same buffer, so they can share it."""
        if draft not in self._keep_stages:
            self._keep_stages[draft] = self._record_keep(draft, check)
        return self._keep_stages[draft]

    @torch.inference_mode()
    def _record_keep(self, draft: DraftPass | None, check: CheckPass) -> KeepStage:
        plan, taps = (check.plan if draft is None else draft.plan), check.taps
        plan.clear_all()  # while recording, kernels run: nobody's slot may be in the plan
        shape = (plan.num_requests, plan.count)
        flat = plan.num_requests * plan.count
        stage = KeepStage(AcceptedRows(*(self._on_device(*one) for one in (shape, shape[:1], (flat,), (flat,)))))
        kept = stage.kept
        if draft is None and (taps is None or self.drafter is None):
            return stage  # a single node stays where it is, and nobody looks at it

        @torch.inference_mode()
        def run() -> None:
            """The target's rows start at the anchor's position, the drafter's at the length of its own cache."""
            slots, starts = plan.inputs.slots, plan.anchor_positions.contiguous()
            if draft is not None:
                self._kernels.move_rows(self.runner.cache.rows, slots, starts, kept.paths, kept.counts)
            if taps is not None and self.drafter is not None:
                self.drafter.store(taps, kept.rows, kept.positions, slots, plan.inputs.starts)

        stage.run = capture(run, self.device, self._pool)
        return stage

    @torch.inference_mode()
    def _record_results(self, step: RecordedStep) -> Results:
        plan = step.plan
        found = Results(
            self._on_host(plan.num_requests, REPORT, dtype=torch.float32),
            self._on_host(plan.num_requests, 1 + plan.count, dtype=torch.int32),
            Stopwatch(self.device, num_marks=2 if step.draft is None else 4),
        )
        check = step.check

        @torch.inference_mode()
        def accept() -> None:
            checked = CheckedTrees(check.best, check.plan.inputs.token_ids, step.parents, plan.inputs.starts)
            self._kernels.accept_trees(checked, step.keep.kept, found.accepted, plan.next_blocks)

        found.accept = capture(accept, self.device, self._pool)
        return found

    def _find_growth(self, step: RecordedStep, choice: Choice) -> GrowthKey:
        """How nodes are chosen, recorded for both results: while a step is in flight, nothing can be."""
        draft, key = step.draft, (choice.is_chain, choice.calibrations)
        assert draft is not None
        weights = None if choice.calibrations is None else self._find_weights(choice.calibrations)
        rules = TreeRules(weights, choice.is_chain)
        for results in step.results:
            if key not in results.grow:

                @torch.inference_mode()
                def grow(report: Tensor = results.report) -> None:
                    limits, trees = draft.plan.tree_limits, step.check.plan.staged
                    self._kernels.grow_trees(draft.draft, rules, limits, trees, step.parents, report)

                results.grow[key] = capture(grow, self.device, self._pool)
        return key

    def _find_weights(self, calibrations: Calibrations) -> Tensor:
        if calibrations not in self._weights:
            weights = calibrations.greedy.plain_weights, calibrations.sampled.plain_weights
            depth = max(map(len, weights))
            rows = [part[np.minimum(np.arange(depth), len(part) - 1)] for part in weights]
            self._weights[calibrations] = torch.from_numpy(np.stack(rows)).to(self.device)
        return self._weights[calibrations]

    def _on_device(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def _on_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def _tree_limits(request: StepRequest) -> tuple[int, int]:
    """Nodes and depth. Deeper tokens than the answer may gain cannot be emitted."""
    depth = min(request.block_size, request.inputs.num_remaining) - 1
    most = min(request.choice.num_nodes or 0, MAX_TREE_NODES)
    return (min(most, depth) if request.choice.is_chain else most if depth else 0), depth


def _check_sizes(choice: Choice, buckets: Sequence[int]) -> Sequence[int]:
    """Buckets of checks that can follow this draft. 0 nodes, as in `Pilot.options`, mean any number."""
    if choice.is_chain:
        return [count for count in buckets if 1 < count <= round_up(choice.draft_size, buckets)]
    return [round_up(choice.num_nodes + 1, buckets)] if choice.num_nodes else buckets[1:]


def _read_reports(ticket: Ticket) -> list[Report]:
    rows = ticket.results.reported[: len(ticket.requests)].tolist()
    return [
        Report(int(row[0]), int(row[1]), row[2], row[3 : 3 + depth])
        for row, (_, depth) in zip(rows, ticket.limits, strict=True)
    ]
