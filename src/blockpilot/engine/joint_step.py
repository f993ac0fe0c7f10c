"""Draft, tree, check and acceptance on a GPU in one go: the host waits once, for the accepted tokens.

Where pilots have said before the draft what to check (`Pilot.ahead`), nothing in a step needs the host. The trees grow
on the device, straight into the plan of the check; the accepted rows are moved and shown to the drafter while the host
makes text of the tokens. A step that cannot go this way takes the host's (`speculative_step.py`); both decide alike, up
to the rounding of path probabilities.
"""

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
from blockpilot.models.trees_reference import REPORT, Blocks
from blockpilot.pilots.base import Ahead

Weights = tuple[FloatArray, FloatArray]


class Joined(NamedTuple):
    """What a step has brought each request, and where the time went."""

    emitted_ids: list[list[int]]
    reports: list[list[float]]  # as `grow_trees` tells them: tokens that were checked, depth, promised, head
    draft_seconds: float
    growth_seconds: float
    verify_seconds: float


@dataclass
class _Ending:
    """What follows the check of one draft, for R requests of n tokens and m drafted positions with their anchor."""

    parents: Tensor  # [R, n]
    report: Tensor  # [R, REPORT], on the host
    accepted: Tensor  # [R, 1 + m], on the host
    accept: Callable[[], None] = field(init=False)
    finish: Callable[[], None] = field(init=False)  # the host does not wait for it
    grow: dict[tuple[bool, int], Callable[[], None]] = field(default_factory=dict)  # by (chain, name of the weights)

    def __post_init__(self) -> None:
        self.accepted_ids, self.reported = self.accepted.numpy(), self.report.numpy()


class JointFlight(NamedTuple):
    """A step that the device has begun."""

    requests: Sequence[DraftRequest]
    ending: _Ending


class JointStep:
    def __init__(self, runner: PlannedRunner, drafter: PlannedDFlashDrafter) -> None:
        self.runner, self.drafter, self.device = runner, drafter, runner.device
        self._kernels = runner.fused.layers.kernels
        self._pool = graph_pool(self.device)
        self._endings: dict[tuple[int, int], tuple[DraftPass, CheckPass, _Ending]] = {}  # passes stay: so do their ids
        self._weights: dict[tuple[int, int], tuple[Weights, Tensor]] = {}  # and arrays
        self._watch = Stopwatch(self.device)

    def can_run(self, num_requests: int, block_size: int, num_tokens: int) -> bool:
        return self.drafter.can_plan(num_requests, block_size) and self.runner.can_plan(num_requests, num_tokens)

    def start(self, requests: Sequence[DraftRequest], ahead: Ahead) -> JointFlight:
        """Begin a step; `ahead` says how all choose nodes. No other may begin before it has been brought home."""
        slots = [request.slot for request in requests]
        num_tokens = 1 + max([request.limits[0] for request in requests])
        draft = self.drafter.find_pass(requests)
        check = self.runner.find_pass(slots, num_tokens, self.drafter.tap_layers)
        ending = self._find_ending(draft, check)
        grow = self._find_growth(draft, check, ending, ahead)
        watch = self._watch
        watch.mark(0)
        self.drafter.start(draft, requests)
        watch.mark(1)
        for slot in slots:
            self.runner.cache.append(slot, num_tokens)
        check.plan.place(slots, self.runner.cache.lengths, [request.params.words for request in requests])
        grow()
        watch.mark(2)
        check.run()
        ending.accept()
        watch.mark(3)
        ending.finish()
        return JointFlight(requests, ending)

    def land(self, flight: JointFlight, is_wanted: Sequence[bool]) -> Joined:
        """Wait for the step. The caches keep what was accepted, of requests that are still wanted."""
        self.wait()
        requests, ending = flight
        accepted = ending.accepted_ids[: len(requests)].tolist()
        emitted, keep, extend = [], self.runner.cache.keep_first, self.drafter.cache.extend
        for request, row, is_kept in zip(requests, accepted, is_wanted, strict=True):
            count = row[0]
            emitted.append(row[1 : count + 1])
            if is_kept:
                keep(request.slot, count)
                extend(request.slot, count)
        return Joined(emitted, ending.reported[: len(requests)].tolist(), *self._watch.seconds())

    def wait(self) -> None:
        self._watch.wait(3)

    def _find_ending(self, draft: DraftPass, check: CheckPass) -> _Ending:
        key = (id(draft), id(check))
        if key not in self._endings:
            self._endings[key] = draft, check, self._record_ending(draft, check)
        return self._endings[key][2]

    @torch.inference_mode()
    def _record_ending(self, draft: DraftPass, check: CheckPass) -> _Ending:
        num_requests, num_drafted = draft.plan.num_requests, draft.plan.count
        target, drafter, taps = check.plan.inputs, draft.plan.inputs, check.taps
        assert taps is not None
        for plan in (draft.plan, check.plan):  # recording runs the kernels, which must not meet the slots of a step
            plan.clear()
            plan.staging.send()

        def on_device(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=self.device)

        def on_host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=self.device.type == "cuda")

        ending = _Ending(
            on_device(num_requests, check.plan.count),
            on_host(num_requests, REPORT, dtype=torch.float32),
            on_host(num_requests, 1 + num_drafted, dtype=torch.int32),
        )
        paths, counts = on_device(num_requests, num_drafted), on_device(num_requests)
        rows, positions = on_device(num_requests * num_drafted), on_device(num_requests * num_drafted)

        @torch.inference_mode()
        def accept() -> None:
            self._kernels.accept_trees(
                check.best, target.token_ids, ending.parents, drafter.starts, paths, counts, rows, positions,
                ending.accepted,
            )  # fmt: skip

        @torch.inference_mode()
        def finish() -> None:
            """Accepted rows to their places, and to the drafter."""
            self._kernels.move_rows(self.runner.cache.rows, target.slots, target.starts, paths, counts)
            self.drafter.store(taps, rows, positions, drafter.slots, drafter.starts)

        ending.accept = capture(accept, self.device, self._pool)
        ending.finish = capture(finish, self.device, self._pool)
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


def build_joint(runner: TargetRunner, drafter: Drafter | None) -> JointStep | None:
    """None where a step needs the host: other devices, other drafters."""
    if isinstance(runner, PlannedRunner) and isinstance(drafter, PlannedDFlashDrafter):
        return JointStep(runner, drafter)
    return None
