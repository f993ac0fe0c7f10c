"""Draft, tree, check and acceptance on a GPU in one go: the host waits once, for the accepted tokens.

Where pilots have said before the draft what to check (`Pilot.ahead`), nothing in a step needs the host. The trees grow
on the device, straight into the plan of the check; the accepted rows are moved and shown to the drafter while the host
makes text of the tokens. A step that cannot go this way takes the host's (`speculative_step.py`); both decide alike, up
to the rounding of path probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.core.candidates import FloatArray
from blockpilot.decoding.drafter import Drafter, DraftRequest
from blockpilot.decoding.planned_dflash import DraftPass, PlannedDFlashDrafter
from blockpilot.engine.planned_runner import CheckPass, PlannedRunner
from blockpilot.engine.runner import TargetRunner
from blockpilot.models.gpu import Stopwatch
from blockpilot.models.trees_reference import REPORT, Blocks
from blockpilot.pilots.base import Ahead, Outcome

Weights = tuple[FloatArray, FloatArray]


class JointRequest(NamedTuple):
    draft: DraftRequest
    num_nodes: int  # at most so many, ..
    depth: int  # .. and none deeper


class Joined(NamedTuple):
    """What a step has brought each request, and where the time went."""

    emitted_ids: list[list[int]]
    num_checked: list[int]  # tokens, the anchor among them
    outcomes: list[Outcome]
    draft_seconds: float
    growth_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class _Buffers:
    """What trees and acceptance write, for R requests of n tokens and m drafted positions with their anchor."""

    parents: Tensor  # [R, n]
    paths: Tensor  # [R, m]
    counts: Tensor  # [R]
    rows: Tensor  # [R * m]
    positions: Tensor  # [R * m]
    accepted: Tensor  # [R, 1 + m], on the host
    report: Tensor  # [R, REPORT], on the host
    accepted_ids: NDArray[Any]
    reported: NDArray[Any]


class JointStep:
    def __init__(self, runner: PlannedRunner, drafter: PlannedDFlashDrafter) -> None:
        self.runner, self.drafter, self.device = runner, drafter, runner.device
        self._kernels = runner.fused.layers.kernels
        self._buffers: dict[tuple[int, int, int], _Buffers] = {}
        self._weights: dict[tuple[int, int], tuple[Weights, Tensor]] = {}  # the arrays stay, and so do their names
        self._watch = Stopwatch(self.device)

    def can_run(self, num_requests: int, block_size: int, num_tokens: int) -> bool:
        return self.drafter.can_plan(num_requests, block_size) and self.runner.can_plan(num_requests, num_tokens)

    def run(self, requests: Sequence[JointRequest], ahead: Ahead) -> Joined:
        """One step; `ahead` says how all choose nodes. The caches keep what was accepted."""
        buffers = self.check(requests, ahead)
        accepted, reported = buffers.accepted_ids[: len(requests)].tolist(), buffers.reported[: len(requests)].tolist()
        emitted, num_checked, outcomes = [], [], []
        for request, (count, *ids), (size, depth, promised, *head) in zip(requests, accepted, reported, strict=True):
            emitted.append(ids[:count])
            num_checked.append(int(size))
            outcomes.append(Outcome(int(depth), promised, head[: request.depth]))
            self.runner.cache.keep(request.draft.slot, range(count), is_moved=True)
            self.drafter.cache.extend(request.draft.slot, count)
        return Joined(emitted, num_checked, outcomes, *self._watch.seconds())

    @torch.inference_mode()
    def check(self, requests: Sequence[JointRequest], ahead: Ahead) -> _Buffers:
        """Everything but what the host remembers: the caches' lengths are as they were."""
        drafts = [request.draft for request in requests]
        slots = [draft.slot for draft in drafts]
        num_tokens = 1 + max(request.num_nodes for request in requests)
        draft = self.drafter.find_pass(drafts)
        check = self.runner.find_pass(slots, num_tokens, self.drafter.tap_layers)
        buffers = self._find_buffers(draft, check)
        weights = None if ahead.weights is None else self._find_weights(ahead.weights)
        watch = self._watch
        watch.mark(0)
        self.drafter.start(draft, drafts, [(request.num_nodes, request.depth) for request in requests])
        watch.mark(1)
        for slot in slots:
            self.runner.cache.append(slot, num_tokens)
        check.plan.place(slots, self.runner.cache.lengths, [one.params.words for one in drafts])
        self._grow(draft, check, buffers, weights, is_chain=ahead.is_chain)
        watch.mark(2)
        check.run()
        self._accept(draft, check, buffers)
        watch.mark(3)
        self._finish(draft, check, buffers)
        watch.wait(3)
        return buffers

    def _grow(
        self, draft: DraftPass, check: CheckPass, buffers: _Buffers, weights: Tensor | None, *, is_chain: bool
    ) -> None:
        plan = draft.plan
        anchors, positions = plan.anchors
        self._kernels.grow_trees(
            Blocks(*draft.ranking.parts()), weights, plan.noise(0).temperatures, plan.limits, anchors, positions,
            check.plan.trees, buffers.parents, buffers.report, is_chain=is_chain,
        )  # fmt: skip

    def _accept(self, draft: DraftPass, check: CheckPass, buffers: _Buffers) -> None:
        self._kernels.accept_trees(
            check.best, check.plan.inputs.token_ids, buffers.parents, draft.plan.inputs.starts, buffers.paths,
            buffers.counts, buffers.rows, buffers.positions, buffers.accepted,
        )  # fmt: skip

    def _finish(self, draft: DraftPass, check: CheckPass, buffers: _Buffers) -> None:
        """Accepted rows to their places, and to the drafter. The host does not wait for it."""
        target, drafter = check.plan.inputs, draft.plan.inputs
        assert check.taps is not None
        self._kernels.move_rows(self.runner.cache.rows, target.slots, target.starts, buffers.paths, buffers.counts)
        self.drafter.store(check.taps, buffers.rows, buffers.positions, drafter.slots, drafter.starts)

    def _find_buffers(self, draft: DraftPass, check: CheckPass) -> _Buffers:
        key = (draft.plan.num_requests, check.plan.count, draft.plan.count)
        if key not in self._buffers:
            self._buffers[key] = _make_buffers(*key, self.device)
        return self._buffers[key]

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


def _make_buffers(num_requests: int, num_tokens: int, num_drafted: int, device: torch.device) -> _Buffers:
    def on_device(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    is_pinned = device.type == "cuda"
    accepted = torch.zeros(num_requests, 1 + num_drafted, dtype=torch.int32, pin_memory=is_pinned)
    report = torch.zeros(num_requests, REPORT, dtype=torch.float32, pin_memory=is_pinned)
    flat = num_requests * num_drafted
    return _Buffers(
        parents=on_device(num_requests, num_tokens),
        paths=on_device(num_requests, num_drafted),
        counts=on_device(num_requests),
        rows=on_device(flat),
        positions=on_device(flat),
        accepted=accepted,
        report=report,
        accepted_ids=accepted.numpy(),
        reported=report.numpy(),
    )
