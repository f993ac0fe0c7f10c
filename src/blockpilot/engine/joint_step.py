"""Draft, tree, check and acceptance on a GPU in one go: the host waits once, for the accepted tokens.

Where pilots have said before the draft what to check (`Pilot.ahead`), nothing in a step needs the host. The trees grow
on the device, straight into the plan of the check; acceptance writes the plan of the next draft. So the next step can
begin before the host knows what this one has brought (`follow`), and the device never waits for the host. A step that
cannot go this way takes the host's (`speculative_step.py`); both decide alike, up to the rounding of paths.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.cache.pass_plan import COUNTS, REQUESTS, round_up
from blockpilot.core.candidates import FloatArray
from blockpilot.decoding.drafter import Drafter, DraftRequest
from blockpilot.decoding.planned_dflash import BLOCKS, DraftPass, PlannedDFlashDrafter
from blockpilot.engine.planned_runner import CheckPass, PlannedRunner
from blockpilot.engine.runner import TargetRunner
from blockpilot.models.gpu import Stopwatch, capture, graph_pool
from blockpilot.models.trees_reference import MAX_WIDTH, REPORT, Blocks
from blockpilot.pilots.base import Ahead, Habits

Weights = tuple[FloatArray, FloatArray]
ACCEPTED = 3  # among the marks of a step


class Joined(NamedTuple):
    """What a step has brought each request, and where the time went."""

    emitted_ids: list[list[int]]
    reports: list[list[float]]  # as `grow_trees` tells them: tokens that were checked, depth, promised, head
    landed: float  # when the host knew
    draft_seconds: float
    growth_seconds: float
    verify_seconds: float


@dataclass
class _Tail:
    """What follows the acceptance of a draft, for R requests of m positions with their anchor."""

    paths: Tensor  # [R, m]
    counts: Tensor  # [R]
    rows: Tensor  # [R * m]
    positions: Tensor  # [R * m]
    run: Callable[[], None] = field(init=False)  # the host does not wait for it


@dataclass
class _Turn:
    """Where one of two steps tells what it has brought. While the host reads it, the device may tell the other."""

    report: Tensor  # [R, REPORT], on the host
    accepted: Tensor  # [R, 1 + m], on the host
    watch: Stopwatch
    accept: Callable[[], None] = field(init=False)
    grow: dict[Hashable, Callable[[], None]] = field(default_factory=dict)  # by how nodes are chosen

    def __post_init__(self) -> None:
        self.accepted_ids, self.reported = self.accepted.numpy(), self.report.numpy()


@dataclass
class _Course:
    """All that a step runs, from a draft to a check and its end, of R requests with n tokens."""

    draft: DraftPass
    check: CheckPass
    tail: _Tail
    parents: Tensor  # [R, n]
    turns: deque[_Turn]  # the next step's first

    def launch(self, growth: Hashable) -> _Turn:
        """What the plan of the draft says; behind it, that plan is the next step's."""
        turn = self.turns[0]
        self.turns.rotate()
        turn.watch.mark(0)
        self.draft.run()
        turn.watch.mark(1)
        turn.grow[growth]()
        turn.watch.mark(2)
        self.check.run()
        turn.accept()
        turn.watch.mark(ACCEPTED)
        self.tail.run()
        return turn


class JointFlight(NamedTuple):
    """A step that the device has begun, or will behind another."""

    requests: Sequence[DraftRequest]  # positions are those of the first step of a row
    ahead: Ahead
    course: _Course
    growth: Hashable
    turn: _Turn
    reach: Sequence[int]  # where each anchor may stand at most


class JointStep:
    def __init__(self, runner: PlannedRunner, drafter: PlannedDFlashDrafter) -> None:
        self.runner, self.drafter, self.device = runner, drafter, runner.device
        self._kernels = runner.fused.layers.kernels
        self._pool = graph_pool(self.device)
        self._tails: dict[int, tuple[DraftPass, _Tail]] = {}  # by the ids of passes, which stay
        self._courses: dict[tuple[int, int], _Course] = {}  # likewise
        self._weights: dict[tuple[int, int], tuple[Weights, Tensor]] = {}  # by those of arrays

    def prepare(self, taps: Tensor) -> None:
        """Record what follows the drafts that are recorded by now; `taps` is the target's buffer."""
        for draft in self.drafter.passes:
            self._find_tail(draft, taps)

    def record(self, habits: Habits) -> None:
        """All steps that a pilot may choose between, out of the passes that are recorded by now."""
        counts = {round_up(size, BLOCKS) for size in habits.draft_sizes}
        checks = self.runner.recorded(self.drafter.tap_layers)
        for draft in [draft for draft in self.drafter.passes if draft.plan.count in counts]:
            most = round_up(draft.plan.count, COUNTS) if habits.ahead.is_chain else COUNTS[-1]
            shape = draft.plan.num_requests, draft.plan.inputs.context
            for check in checks:
                if (check.plan.num_requests, check.plan.inputs.context) == shape and 1 < check.plan.count <= most:
                    self._find_growth(self._find_course(draft, check), habits.ahead)

    def can_run(self, num_requests: int, block_size: int, num_tokens: int) -> bool:
        return self.drafter.can_plan(num_requests, block_size) and self.runner.can_plan(num_requests, num_tokens)

    def start(self, requests: Sequence[DraftRequest], ahead: Ahead) -> JointFlight:
        """Begin a step while no other is on its way; `ahead` says how all choose nodes."""
        slots = [request.slot for request in requests]
        num_tokens = 1 + max([request.limits[0] for request in requests])
        draft = self.drafter.find_pass(requests)
        check = self.runner.find_pass(slots, num_tokens, self.drafter.tap_layers)
        course = self._find_course(draft, check)
        growth = self._find_growth(course, ahead)
        self.drafter.write(draft, requests)
        for slot in slots:
            self.runner.cache.append(slot, num_tokens)
        check.plan.place(slots, self.runner.cache.lengths, [request.params.words for request in requests])
        reach = [request.position for request in requests]
        return JointFlight(requests, ahead, course, growth, course.launch(growth), reach)

    def follow(self, flight: JointFlight, ahead: Ahead, positions: Sequence[int | None]) -> JointFlight | None:
        """Begin the step behind one that has not landed, of the same requests. None where it would be another.

        `positions` say where anchors stood before that step; None: the request has ended. It keeps its row for as long
        as there is room, and nobody else may get its slot before all steps have landed.
        """
        requests, course, draft, check = (
            flight.requests,
            flight.course,
            flight.course.draft.plan,
            flight.course.check.plan,
        )
        if ahead[:2] != flight.ahead[:2] or ahead.weights is not flight.ahead.weights:
            return None
        if round_up(len(positions) - positions.count(None), REQUESTS) < draft.num_requests:
            return None
        reach = [
            request.block_size + (last if now is None else now)
            for request, now, last in zip(requests, positions, flight.reach, strict=True)
        ]
        farthest = max(reach)
        capacity = min(self.runner.cache.capacity, self.drafter.cache.capacity)
        context = min(draft.inputs.context, check.inputs.context)
        if farthest > context or farthest + max(draft.count, check.count) > capacity:
            return None
        return flight._replace(turn=course.launch(flight.growth), reach=reach)

    def land(self, flight: JointFlight, is_wanted: Sequence[bool]) -> Joined:
        """Wait for the step. The caches keep what was accepted, of requests that are still wanted."""
        requests, turn = flight.requests, flight.turn
        turn.watch.wait(ACCEPTED)
        landed = time.perf_counter()
        accepted = turn.accepted_ids[: len(requests)].tolist()
        emitted = []
        keep, extend = self.runner.cache.extend, self.drafter.cache.extend
        for request, row, is_kept in zip(requests, accepted, is_wanted, strict=True):
            count = row[0]
            emitted.append(row[1 : count + 1])
            if is_kept:
                keep(request.slot, count)
                extend(request.slot, count)
        return Joined(emitted, turn.reported[: len(requests)].tolist(), landed, *turn.watch.seconds())

    def _find_tail(self, draft: DraftPass, taps: Tensor) -> _Tail:
        if id(draft) not in self._tails:
            self._tails[id(draft)] = draft, self._record_tail(draft, taps)
        return self._tails[id(draft)][1]

    @torch.inference_mode()
    def _record_tail(self, draft: DraftPass, taps: Tensor) -> _Tail:
        plan, num_requests, num_drafted = draft.plan, draft.plan.num_requests, draft.plan.count
        plan.clear_all()
        shapes = ((num_requests, num_drafted), (num_requests,), (num_requests * num_drafted,))
        tail = _Tail(*(self._on_device(*shape) for shape in (*shapes, shapes[-1])))

        @torch.inference_mode()
        def run() -> None:
            """Accepted rows to their places, and to the drafter. The target's rows start where the anchor stands."""
            slots, starts = plan.inputs.slots, plan.anchor_positions.contiguous()
            self._kernels.move_rows(self.runner.cache.rows, slots, starts, tail.paths, tail.counts)
            self.drafter.store(taps, tail.rows, tail.positions, slots, plan.inputs.starts)

        tail.run = capture(run, self.device, self._pool)
        return tail

    def _find_course(self, draft: DraftPass, check: CheckPass) -> _Course:
        key = (id(draft), id(check))
        if key not in self._courses:
            self._courses[key] = self._record_course(draft, check)
        return self._courses[key]

    def _record_course(self, draft: DraftPass, check: CheckPass) -> _Course:
        assert check.taps is not None
        tail = self._find_tail(draft, check.taps)
        parents = self._on_device(draft.plan.num_requests, check.plan.count) - 1
        course = _Course(draft, check, tail, parents, deque())
        course.turns.extend(self._record_turn(course) for _ in range(2))
        return course

    @torch.inference_mode()
    def _record_turn(self, course: _Course) -> _Turn:
        draft, check, tail = course.draft, course.check, course.tail
        turn = _Turn(
            self._on_host(draft.plan.num_requests, REPORT, dtype=torch.float32),
            self._on_host(draft.plan.num_requests, 1 + draft.plan.count, dtype=torch.int32),
            Stopwatch(self.device, num_marks=ACCEPTED + 1),
        )

        @torch.inference_mode()
        def accept() -> None:
            self._kernels.accept_trees(
                check.best, check.plan.inputs.token_ids, course.parents, draft.plan.inputs.starts, tail.paths,
                tail.counts, tail.rows, tail.positions, turn.accepted, draft.plan.next_blocks,
            )  # fmt: skip

        turn.accept = capture(accept, self.device, self._pool)
        return turn

    def _find_growth(self, course: _Course, ahead: Ahead) -> Hashable:
        """How nodes are chosen, recorded for both turns: while one is on its way, nothing can be."""
        weights = None if ahead.weights is None else self._find_weights(ahead.weights)
        key = (ahead.is_chain, id(weights))
        draft, plan = course.draft, course.draft.plan
        temperatures = plan.noise(0).temperatures
        for turn in course.turns:
            if key not in turn.grow:

                @torch.inference_mode()
                def grow(report: Tensor = turn.report) -> None:
                    self._kernels.grow_trees(
                        Blocks(*draft.ranking.parts()), weights, temperatures, plan.limits, plan.anchors,
                        plan.anchor_positions, course.check.plan.trees, course.parents, report, is_chain=key[0],
                    )  # fmt: skip

                turn.grow[key] = capture(grow, self.device, self._pool)
        return key

    def _find_weights(self, weights: Weights) -> Tensor:
        key = (id(weights[0]), id(weights[1]))
        if key not in self._weights:
            depth = max(map(len, weights))
            rows = [part[np.minimum(np.arange(depth), len(part) - 1)] for part in weights]
            self._weights[key] = weights, torch.from_numpy(np.stack(rows)).to(self.device)
        return self._weights[key][1]

    def _on_device(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def _on_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def build_joint(runner: TargetRunner, drafter: Drafter | None) -> JointStep | None:
    """None where a step needs the host: other devices, other drafters, more candidates than kernels take."""
    if not isinstance(runner, PlannedRunner) or not isinstance(drafter, PlannedDFlashDrafter):
        return None
    return JointStep(runner, drafter) if drafter.max_width <= MAX_WIDTH else None
