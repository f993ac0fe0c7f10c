"""Deciding for all requests at once gives what deciding one by one gives, with compiled code and without."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pytest

from blockpilot.core.candidates import Candidates, shared_stack, stack_candidates
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.tree import DraftTree
from blockpilot.pilots import switch
from blockpilot.pilots.base import Asked, Drafted, Pilot
from blockpilot.pilots.batch import choose_sizes, in_groups, select_trees
from blockpilot.pilots.calibration import FEATURES, IDENTITY, Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot, TreePilot
from blockpilot.pilots.growth import falling_costs, grow_calibrated, grow_stacked
from blockpilot.pilots.step import StepPilot
from tests.tiny import RandomTreePilot
from tests.unit.pilots.pieces import make_inputs, random_candidates

PADDED = replace(StepCosts.linear(draft=0.2, slope=0.03), padding=(1, 2, 4, 8, 16, 32, 64))
POOR = replace(StepCosts.linear(draft=0.6, slope=0.12), padding=(1, 2, 4, 8, 16))
DRAFTED_WIDTH = 16


@pytest.fixture(params=["numba", "python"], autouse=True)
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(switch, "load_compiled", lambda: None)
    elif switch.load_compiled() is None:
        pytest.skip("Numba is not installed")
    return str(request.param)


def fitted(seed: int) -> Calibration:
    noise = np.random.default_rng(seed).normal(size=(5, len(FEATURES))) * 0.3
    return Calibration((np.array(IDENTITY) + noise).astype(np.float32))


def choose_one_by_one(requests: list[Asked]) -> list[int]:
    return [pilot.choose(inputs) for pilot, inputs in requests]


def select_one_by_one(requests: list[Drafted]) -> list[DraftTree]:
    return [pilot.select_tree(inputs, candidates, anchor_id) for pilot, inputs, candidates, anchor_id in requests]


@dataclass
class Batch:
    """Requests that decode together, end at different steps and are joined by others."""

    kinds: list[Pilot]
    choose: Callable[[list[Asked]], list[int]]
    select: Callable[[list[Drafted]], list[DraftTree]]
    is_pairwise: bool
    remaining: dict[int, int] = field(default_factory=dict)
    pilots: dict[int, Pilot] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)

    def add(self, request: int, num_tokens: int) -> None:
        self.pilots[request] = self.kinds[request % len(self.kinds)].start(None)
        self.remaining[request], self.emitted[request] = num_tokens, 0

    def step(self, number: int) -> list[tuple[int, int, DraftTree | None]]:
        """(request, draft size, tree) of all; what a tree emits is drawn, and the same for the same tree."""
        inputs = {
            request: make_inputs(
                batch_size=len(self.pilots),
                context_length=100 + number,
                num_remaining=self.remaining[request],
                last_emitted=self.emitted[request],
                temperature=0.7 * (request % 3 == 1),
            )
            for request in self.pilots
        }
        asked = [request for request in self.pilots if self.remaining[request] > 1]
        sizes = dict(zip(asked, self.choose([(self.pilots[one], inputs[one]) for one in asked]), strict=True))
        drafting = [request for request in asked if sizes[request] > 1]
        blocks = self.draft(number)
        drafts = {one: show(blocks[row], sizes[one], self.pilots[one]) for row, one in enumerate(drafting)}
        drafted = [(self.pilots[one], inputs[one], drafts[one], 7 + one) for one in drafting]
        trees = dict(zip(drafting, self.select(drafted), strict=True))
        report = [(request, sizes.get(request, 1), trees.get(request)) for request in self.pilots]
        for request in list(self.pilots):
            deepest = trees[request].max_depth if request in trees else 0
            self.emitted[request] = 1 + np.random.default_rng([number, request, deepest]).binomial(deepest, 0.6)
            self.remaining[request] -= self.emitted[request]
            if self.remaining[request] <= 0:
                del self.pilots[request]
        return report

    def draft(self, number: int) -> list[Candidates]:
        seeds = range(100 * number, 100 * number + len(self.pilots) + 1)  # a row that only rounds up, too
        return stack_candidates(
            [random_candidates(seed, depth=15, width=DRAFTED_WIDTH, is_pairwise=self.is_pairwise) for seed in seeds]
        )


def show(block: Candidates, size: int, pilot: Pilot) -> Candidates:
    """As deep and wide as was asked for."""
    depth, width = size - 1, DRAFTED_WIDTH if pilot.num_candidates == 1 else pilot.num_candidates
    return replace(
        block,
        token_ids=block.token_ids[:depth, :width],
        log_probs=block.log_probs[:depth, :width],
        first=None if block.first is None else block.first[:width],
        pairwise=None if block.pairwise is None else block.pairwise[: depth - 1, :width, :width],
    )


def memories(batch: Batch) -> Iterator[object]:
    for kind in batch.kinds:
        if isinstance(kind, StepPilot):
            yield asdict(kind._together.recent), asdict(kind._together.gate), kind._together.num_nodes
    for pilot in batch.pilots.values():
        if isinstance(pilot, StepPilot):
            yield asdict(pilot.recent), asdict(pilot.gate), pilot._checked, pilot._was_shared


KINDS: dict[str, Callable[[], list[Pilot]]] = {
    "step": lambda: [StepPilot(Calibration.identity(), PADDED)],
    "sampled": lambda: [StepPilot(fitted(0), PADDED, sampled=fitted(1))],
    "chain-step": lambda: [StepPilot(fitted(2), PADDED, is_chain=True)],
    "poor": lambda: [StepPilot(fitted(3), POOR)],
    "alone": lambda: [StepPilot(fitted(4), StepCosts.linear(draft=0.2, slope=0.03))],
    "tree": lambda: [TreePilot(15, 16)],
    "fixed": lambda: [FixedPilot(6)],
    "mixed": lambda: [
        StepPilot(fitted(5), PADDED),
        TreePilot(15, 16),
        StepPilot(fitted(6), PADDED, is_chain=True),
        FixedPilot(6),
        RandomTreePilot(3),
        StepPilot(fitted(7), POOR),
        TreePilot(4, 8),
    ],
}


@pytest.mark.parametrize("is_pairwise", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_all_at_once_decides_as_one_by_one(name: str, is_pairwise: bool) -> None:
    ways = [(choose_sizes, select_trees), (choose_one_by_one, select_one_by_one)]
    batches = [Batch(KINDS[name](), *way, is_pairwise=is_pairwise) for way in ways]  # type: ignore[arg-type]
    number = num_drafted = 0
    while number <= 12 or batches[0].pilots:  # at the end one request is alone
        if number in (0, 12):  # others join while the first are on their way
            for batch in batches:
                for request in range(9):
                    batch.add(10 * number + request, 15 + 5 * request)
        reports = [batch.step(number) for batch in batches]
        assert reports[0] == reports[1]
        assert list(memories(batches[0])) == list(memories(batches[1]))
        num_drafted += sum(tree is not None for _, _, tree in reports[0])
        number += 1
    assert num_drafted


def test_a_round_is_begun_by_one_who_has_asked_before() -> None:
    """Requests that are new stand first here, and get the size of the round before, as they would one by one."""
    sizes = []
    for choose in (choose_sizes, choose_one_by_one):
        kind = StepPilot(Calibration.identity(), POOR)
        old, new = [kind.start(None) for _ in range(2)], [kind.start(None) for _ in range(2)]
        found = []
        for _ in range(30):
            found.append(choose([(pilot, make_inputs(batch_size=2, last_emitted=1)) for pilot in old]))
            for pilot in old:
                pilot._checked = 3, 2.5
        found.append(choose([(pilot, make_inputs(batch_size=4, last_emitted=1)) for pilot in [*new, *old]]))
        found.append([len(kind._together._asked)])
        sizes.append(found)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("is_pairwise", [True, False])
@pytest.mark.parametrize(("num_nodes", "depth"), [(0, 15), (5, 1), (15, 2), (15, 15), (MAX_TREE_NODES + 12, 15)])
def test_stacked_growth_is_growth_of_each(language: str, is_pairwise: bool, num_nodes: int, depth: int) -> None:
    if language == "python":
        pytest.skip("only compiled code reads stacks")
    drafts = stack_candidates(
        [random_candidates(seed, depth=15, width=6, is_pairwise=is_pairwise) for seed in range(5)]
    )
    stack, calibration, costs = shared_stack(drafts), fitted(1), falling_costs(num_nodes)
    assert stack is not None
    rows = [4, 0, 2]
    forest = grow_stacked(
        stack,
        [(row, 100 + row, depth) for row in rows],
        calibration.plain_weights,
        costs,
        trust=0.9,
        width=6,
        is_chain=False,
    )
    for row, tree, checked, head in zip(rows, *forest, strict=True):
        growth, paths = grow_calibrated(
            drafts[row], calibration, costs, trust=0.9, depth=depth, width=6, is_chain=False
        )
        assert tree == growth.tree(100 + row) and checked == (growth.depth, growth.promised)
        assert tuple(head) == tuple(paths)


def test_only_candidates_of_one_shape_and_place_share_a_stack() -> None:
    drafts, others = ([*stack_candidates([random_candidates(seed) for seed in range(3)])] for _ in range(2))
    assert shared_stack(drafts) is drafts[0].stack is not None
    assert shared_stack([drafts[0], others[1]]) is None
    assert shared_stack([drafts[0], replace(drafts[1], token_ids=drafts[1].token_ids[:3])]) is None
    assert shared_stack([random_candidates(0), random_candidates(1)]) is None


def test_arrays_of_other_forms_are_no_stack() -> None:
    draft = random_candidates(0)
    wide = replace(draft, log_probs=draft.log_probs.astype(np.float64))  # type: ignore[arg-type]
    assert stack_candidates([wide, wide])[0].stack is None


def test_groups_keep_the_order_of_requests() -> None:
    asked: list[list[int]] = []

    def answer(group: list[int]) -> list[int]:
        asked.append(group)
        return [10 * number for number in group]

    marks = ["odd", "even"]
    assert in_groups(range(5), [marks[number % 2] for number in range(5)], answer) == [0, 10, 20, 30, 40]  # type: ignore[arg-type]
    assert asked == [[0, 2, 4], [1, 3]]
    assert in_groups([], [], answer) == []  # type: ignore[arg-type]
