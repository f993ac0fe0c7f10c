"""Draft, tree, check and acceptance on a GPU in one go: the host waits once, for the accepted tokens.

Where pilots have said before the draft what to check (`Pilot.ahead`), nothing in a step needs the host. The trees grow
on the device, straight into the plan of the check; the accepted rows are moved and shown to the drafter while the host
makes text of the tokens. A step that cannot go this way takes the host's (`speculative_step.py`); both decide alike, up
to the rounding of path probabilities.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.core.candidates import FloatArray
from blockpilot.decoding.drafter import Drafter, DraftRequest
from blockpilot.decoding.planned_dflash import DraftPass, PlannedDFlashDrafter
from blockpilot.engine.planned_runner import CheckPass, PlannedRunner
from blockpilot.engine.runner import TargetRunner
from blockpilot.models.gpu import Stopwatch, capture, graph_pool
from blockpilot.models.trees_reference import MAX_WIDTH, REPORT, Blocks
from blockpilot.pilots.base import Ahead

Weights = tuple[FloatArray, FloatArray]


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
class _Ending:
    """Growth and acceptance between a draft and a check, of R requests with n tokens."""

    tail: _Tail
    parents: Tensor  # [R, n]
    report: Tensor  # [R, REPORT], on the host
    accepted: Tensor  # [R, 1 + m], on the host
    accept: Callable[[], None] = field(init=False)
    grow: dict[tuple[bool, int], Callable[[], None]] = field(default_factory=dict)  # by (chain, name of the weights)

    def __post_init__(self) -> None:
        self.accepted_ids, self.reported = self.accepted.numpy(), self.report.numpy()


class JointFlight(NamedTuple):
    """A step that the device has begun."""

    requests: Sequence[DraftRequest]
    ending: _Ending
    watch: Stopwatch


class JointStep:
    def __init__(self, runner: PlannedRunner, drafter: PlannedDFlashDrafter) -> None:
        self.runner, self.drafter, self.device = runner, drafter, runner.device
        self._kernels = runner.fused.layers.kernels
        self._pool = graph_pool(self.device)
        self._tails: dict[int, tuple[DraftPass, _Tail]] = {}  # by the ids of passes, which stay
        self._endings: dict[tuple[int, int], tuple[DraftPass, CheckPass, _Ending]] = {}  # likewise
        self._weights: dict[tuple[int, int], tuple[Weights, Tensor]] = {}  # by those of arrays
        self._watches = deque([Stopwatch(self.device), Stopwatch(self.device)])  # of this step, and of the next

    def prepare(self, taps: Tensor) -> None:
        """Record what follows the drafts that are recorded by now; `taps` is the target's buffer."""
        for draft in self.drafter.passes:
            self._find_tail(draft, taps)

    def can_run(self, num_requests: int, block_size: int, num_tokens: int) -> bool:
        return self.drafter.can_plan(num_requests, block_size) and self.runner.can_plan(num_requests, num_tokens)

    def start(self, requests: Sequence[DraftRequest], ahead: Ahead, *, is_last: bool = False) -> JointFlight:
        """Begin a step; `ahead` says how all choose nodes. No other may begin before this one has landed.

        The next step will most likely draft for the same requests, with the same sizes: unless `is_last`, or unless a
        request is about to end, the device goes on to that draft while the host learns what was accepted.
        """
        slots = [request.slot for request in requests]
        num_tokens = 1 + max([request.limits[0] for request in requests])
        draft = self.drafter.find_pass(requests)
        check = self.runner.find_pass(slots, num_tokens, self.drafter.tap_layers)
        ending = self._find_ending(draft, check)
        grow = self._find_growth(draft, check, ending, ahead)
        watch = self._watches[0]
        lookahead = self.drafter.lookahead
        if lookahead.take(draft, [request[:4] for request in requests]):  # slot, anchor, position and size
            draft.plan.write_limits([request.limits for request in requests])
        else:
            watch.mark(0)
            self.drafter.start(draft, requests)
            watch.mark(1)
        self.runner.lookahead.cancel()
        for slot in slots:
            self.runner.cache.append(slot, num_tokens)
        check.plan.place(slots, self.runner.cache.lengths, [request.params.words for request in requests])
        grow()
        watch.mark(2)
        check.run()
        ending.accept()
        watch.mark(3)
        ending.tail.run()
        self._watches.rotate()
        if not is_last and all(request.limits[1] == request.block_size - 1 for request in requests):
            self._watches[0].mark(0)
            draft.run()
            self._watches[0].mark(1)
            lookahead.begin(draft, self._watches[0], 1)
        return JointFlight(requests, ending, watch)

    def land(self, flight: JointFlight, is_wanted: Sequence[bool]) -> Joined:
        """Wait for the step. The caches keep what was accepted, of requests that are still wanted."""
        requests, ending, watch = flight
        watch.wait(3)
        landed = time.perf_counter()
        accepted = ending.accepted_ids[: len(requests)].tolist()
        emitted, blocks = [], []
        keep, extend = self.runner.cache.keep_first, self.drafter.cache.extend
        for request, row, is_kept in zip(requests, accepted, is_wanted, strict=True):
            count = row[0]
            emitted.append(row[1 : count + 1])
            blocks.append((request.slot, row[count], request.position + count, request.block_size))
            if is_kept:
                keep(request.slot, count)
                extend(request.slot, count)
        self.drafter.lookahead.expect(blocks)
        return Joined(emitted, ending.reported[: len(requests)].tolist(), landed, *watch.seconds())

    def cancel(self) -> None:
        """Before slots change in ways that the drafter does not see: the device may be drafting there."""
        self.drafter.lookahead.cancel()

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

    def _find_ending(self, draft: DraftPass, check: CheckPass) -> _Ending:
        key = (id(draft), id(check))
        if key not in self._endings:
            self._endings[key] = draft, check, self._record_ending(draft, check)
        return self._endings[key][2]

    @torch.inference_mode()
    def _record_ending(self, draft: DraftPass, check: CheckPass) -> _Ending:
        assert check.taps is not None
        num_requests, num_drafted = draft.plan.num_requests, draft.plan.count
        tail = self._find_tail(draft, check.taps)
        ending = _Ending(
            tail,
            self._on_device(num_requests, check.plan.count) - 1,
            self._on_host(num_requests, REPORT, dtype=torch.float32),
            self._on_host(num_requests, 1 + num_drafted, dtype=torch.int32),
        )

        @torch.inference_mode()
        def accept() -> None:
            self._kernels.accept_trees(
                check.best, check.plan.inputs.token_ids, ending.parents, draft.plan.inputs.starts, tail.paths,
                tail.counts, tail.rows, tail.positions, ending.accepted, draft.plan.next_blocks,
            )  # fmt: skip

        ending.accept = capture(accept, self.device, self._pool)
        return ending

    def _find_growth(self, draft: DraftPass, check: CheckPass, ending: _Ending, ahead: Ahead) -> Callable[[], None]:
        weights = None if ahead.weights is None else self._find_weights(ahead.weights)
        key = (ahead.is_chain, id(weights))
        if key not in ending.grow:
            plan = draft.plan
            temperatures = plan.noise(0).temperatures

            @torch.inference_mode()
            def grow() -> None:
                self._kernels.grow_trees(
                    Blocks(*draft.ranking.parts()), weights, temperatures, plan.limits, plan.anchors,
                    plan.anchor_positions, check.plan.trees, ending.parents, ending.report, is_chain=key[0],
                )  # fmt: skip

            ending.grow[key] = capture(grow, self.device, self._pool)
        return ending.grow[key]

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
