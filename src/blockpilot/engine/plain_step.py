"""Plain decoding on a GPU without the host in between: each token's pass is begun before the host knows the token.

The pass of a token ends with the next one in its plan, as an accepted tree of one node (`accept_trees`). So the device
takes the same two graphs again and again (`follow`), and the host reads what it has told, one token behind. Requests
that may draft later show each token to the drafter on the way. Steps of requests that filter tokens go other ways
(`speculative_step.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.cache.pass_plan import REQUESTS, Words, round_up
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.planned_dflash import PlannedDFlashDrafter
from blockpilot.engine.planned_runner import CheckPass, PlannedRunner
from blockpilot.engine.runner import TargetRunner
from blockpilot.models.gpu import Stopwatch, capture, graph_pool

END = 1  # of a pass, among the marks of its stopwatch


class PlainRequest(NamedTuple):
    """All that a token depends on, but for the rows of its slot."""

    slot: int
    anchor_id: int
    position: int  # of the anchor in the sequence
    words: Words  # how it samples


class Decoded(NamedTuple):
    """What a step has brought each request, and where the time went."""

    emitted_ids: list[list[int]]  # one token each
    landed: float  # when the host knew
    verify_seconds: float


@dataclass
class _Turn:
    """One of two ends of a pass. While the host reads what one has told, the device may already tell the other."""

    accepted: Tensor  # [R, 2] on the host: the number 1, and the token
    watch: Stopwatch
    accept: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.told = self.accepted.numpy()


class PlainFlight(NamedTuple):
    """A step that the device has begun, or will behind another."""

    requests: Sequence[PlainRequest]  # anchors are those of the first step
    is_shown: bool  # whether the drafter sees the tokens
    check: CheckPass
    turn: _Turn
    reach: int  # where the farthest anchor stands


class PlainStep:
    def __init__(self, runner: PlannedRunner, drafter: PlannedDFlashDrafter | None = None) -> None:
        """`drafter` is one that steps can be shown to."""
        self.runner, self.drafter, self.device = runner, drafter, runner.device
        self._pool = graph_pool(self.device)
        self._turns: dict[int, tuple[CheckPass, deque[_Turn]]] = {}  # by the ids of passes, which stay

    def prepare(self, num_requests: int) -> None:
        """Record all that steps of that many requests need."""
        if self.can_run(num_requests):
            for tap_layers in {(), tuple(self.drafter.tap_layers)} if self.drafter else {()}:
                for check in self.runner.find_passes(num_requests, 1, tap_layers):
                    self._find_turns(check)

    def can_run(self, num_requests: int) -> bool:
        return self.runner.can_plan(num_requests, 1)

    def start(self, requests: Sequence[PlainRequest], *, is_shown: bool = False) -> PlainFlight:
        """Begin a step while no other is on its way; `is_shown`: requests may draft later."""
        cache, slots = self.runner.cache, [request.slot for request in requests]
        for slot in slots:
            cache.append(slot, 1)
        check = self.runner.find_pass(slots, 1, self.drafter.tap_layers if is_shown and self.drafter else ())
        turns = self._find_turns(check)
        trees = [(request.slot, DraftTree.chain(request.anchor_id, [])) for request in requests]
        check.plan.write_trees(trees, cache.lengths, [request.words for request in requests])
        reach = max([request.position for request in requests])
        return PlainFlight(requests, is_shown, check, _launch(check, turns), reach)

    def follow(self, flight: PlainFlight, num_requests: int) -> PlainFlight | None:
        """Begin the step behind one that has not landed, of the same requests. None where it would be another.

        So many of them have not ended. The others keep their rows for as long as there is room, and nobody else may get
        their slots before all steps have landed.
        """
        plan, reach, capacity = flight.check.plan, flight.reach + 1, self.runner.cache.capacity
        if flight.is_shown and self.drafter is not None:
            capacity = min(capacity, self.drafter.cache.capacity)
        if round_up(num_requests, REQUESTS) < plan.num_requests:
            return None
        if reach > plan.inputs.context or reach >= capacity:
            return None
        return flight._replace(turn=_launch(flight.check, self._find_turns(flight.check)), reach=reach)

    def land(self, flight: PlainFlight, is_wanted: Sequence[bool]) -> Decoded:
        """Wait for the step. The cache keeps the rows of requests that are still wanted."""
        requests, turn = flight.requests, flight.turn
        turn.watch.wait(END)
        landed = time.perf_counter()
        token_ids = turn.told[: len(requests), 1].tolist()
        for request, is_kept in zip(requests, is_wanted, strict=True):
            if is_kept:
                self.runner.cache.extend(request.slot, 1)
                if flight.is_shown and self.drafter is not None:
                    self.drafter.cache.extend(request.slot, 1)
        return Decoded([[token_id] for token_id in token_ids], landed, turn.watch.seconds()[0])

    def _find_turns(self, check: CheckPass) -> deque[_Turn]:
        if id(check) not in self._turns:
            check.plan.clear_all()
            self._turns[id(check)] = check, deque([self._record(check), self._record(check)])
        return self._turns[id(check)][1]

    @torch.inference_mode()
    def _record(self, check: CheckPass) -> _Turn:
        plan, num_requests = check.plan, check.plan.num_requests
        accepted = torch.zeros(num_requests, 2, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        turn = _Turn(accepted, Stopwatch(self.device, num_marks=END + 1))
        parents, paths, counts, rows, positions = (
            torch.full((num_requests,), -1, dtype=torch.int32, device=self.device) for _ in range(5)
        )

        @torch.inference_mode()
        def accept() -> None:
            """Trees of one node have no parents; where the node lies in the cache, it stays."""
            self.runner.fused.layers.kernels.accept_trees(
                check.best, plan.inputs.token_ids, parents.view(-1, 1), plan.inputs.starts, paths.view(-1, 1), counts,
                rows, positions, turn.accepted, plan.next_blocks,
            )  # fmt: skip
            if check.taps is not None and self.drafter is not None:
                self.drafter.store(check.taps, rows, positions, plan.inputs.slots, plan.inputs.starts)

        turn.accept = capture(accept, self.device, self._pool)
        return turn


def _launch(check: CheckPass, turns: deque[_Turn]) -> _Turn:
    """The pass that is in the plan; behind it the plan is the next token's."""
    turn = turns[0]
    turn.watch.mark(0)
    check.run()
    turn.accept()
    turn.watch.mark(END)
    turns.rotate()
    return turn


def build_plain(runner: TargetRunner, drafter: Drafter | None) -> PlainStep | None:
    """None where a step needs the host: other devices."""
    if not isinstance(runner, PlannedRunner):
        return None
    return PlainStep(runner, drafter if isinstance(drafter, PlannedDFlashDrafter) else None)
