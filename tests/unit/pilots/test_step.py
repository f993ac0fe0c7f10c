"""The adaptive pilot: where it stops, when it gives up, and that it changes no token."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockpilot import SamplingParams
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import PLAIN, Asked, Drafted, PilotInputs
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.forecast import Forecast
from blockpilot.pilots.loops.forecast import CHECK_MARGIN, SIZE_MARGIN
from blockpilot.pilots.memory import FIRST_WAIT, LAST_WAIT, Recent, StepMemory
from blockpilot.pilots.step import REVIEW, StepPilot
from tests.tiny import ScriptedDrafter, make_dflash, make_eagle3, make_llm
from tests.unit.pilots.pieces import BUCKETS, Batch, choose_one, make_inputs, select_one, sure_draft

FLAT = StepCosts.linear(draft=0.15, fixed=1.0, slope=0.0)
STEEP = StepCosts.linear(draft=0.15, fixed=1.0, slope=0.2)
SATURATED = StepCosts.linear(draft=0.15, fixed=0.5, slope=0.5)
PROMPTS = ["the quick brown fox", "abcabcabcabcabcabc", "Z", "speculation is cheap and proof is dear 0123"]


PADDED = StepCosts.linear(draft=0.2, slope=0.03)


def make_pilot(costs: StepCosts, **options: Any) -> StepPilot:
    return StepPilot(Calibration.identity(), costs, **options)


def count_nodes(pilot: StepPilot, inputs: PilotInputs, draft: HostDraft) -> int:
    """Of a request that is at its first draft."""
    return len(select_one(pilot, inputs, draft, pilot.start(None)).tree) - 1


@pytest.mark.parametrize("is_chain", [False, True])
def test_it_checks_as_much_as_pays(is_chain: bool) -> None:
    sizes = []
    for costs in (FLAT, StepCosts.linear(slope=0.05), STEEP, SATURATED):
        sizes.append(count_nodes(make_pilot(costs, is_chain=is_chain), make_inputs(), sure_draft(0.7)))
    assert sizes[0] == (15 if is_chain else 63)
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < 6 and sizes[3] == 0


def test_the_peak_of_a_steep_curve_is_met() -> None:
    found = count_nodes(make_pilot(STEEP, is_chain=True), make_inputs(), sure_draft(0.8))
    rates = [sum(0.8**k for k in range(n + 1)) / STEEP.step_ms(16, n + 1) for n in range(16)]
    assert found == int(np.argmax(rates))


def test_a_sure_drafter_is_asked_for_more_than_a_poor_one() -> None:
    chosen = {}
    for share in (0.3, 0.95):
        batch = Batch(make_pilot(StepCosts.linear(draft=0.2, slope=0.01), is_chain=True))
        batch.join()
        for _ in range(8 * REVIEW):
            chosen[share] = batch.step([share], [16 if share > 0.9 else 1])[0][0]
    assert chosen[0.95] == 16 and chosen[0.3] < 16


def count_forecasts(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list whose length is how often a forecast was asked for."""
    asked: list[int] = []
    original = getattr(Forecast, name)
    monkeypatch.setattr(Forecast, name, lambda *given: asked.append(1) or original(*given))
    return asked


def test_a_draft_size_holds_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_forecasts(monkeypatch, "best_size")
    pilot = make_pilot(StepCosts.linear(draft=0.2, slope=0.01))
    for _ in range(2):  # a new request asks anew
        batch = Batch(pilot)
        batch.join()
        for _ in range(REVIEW + 1):
            batch.step([0.8], [3])
    assert len(asked) == 4


def test_a_kept_draft_size_ends_with_a_lower_limit_and_in_a_batch() -> None:
    pilot = make_pilot(StepCosts.linear(draft=0.2, slope=0.01))
    memory = pilot.start(None)
    assert choose_one(pilot, make_inputs(), memory).draft_size == 16
    assert choose_one(pilot, make_inputs(max_block_size=3), memory) == PLAIN
    memory = pilot.start(None)
    assert choose_one(pilot, make_inputs(buckets=BUCKETS), memory).draft_size and memory.num_kept
    choose_one(pilot, make_inputs(batch_size=2, buckets=BUCKETS), memory)
    assert not memory.num_kept


def test_a_busier_batch_checks_less() -> None:
    pilot, draft = make_pilot(STEEP), sure_draft(0.7)
    sizes = [count_nodes(pilot, make_inputs(batch_size=n), draft) for n in (1, 2, 8)]
    assert sizes[0] > sizes[1] >= sizes[2]


def test_requests_of_a_padded_batch_take_one_size_and_learn_from_each_other() -> None:
    batch = Batch(make_pilot(PADDED), BUCKETS)
    batch.join(3)
    shares = [0.95, 0.5, 0.05]
    sizes, counts = batch.step(shares, [1] * 3)
    assert len(set(sizes)) == 1 and len(set(counts)) == 1 and counts[0] + 1 in BUCKETS
    checked: dict[int, list[int]] = {12: [], 1: []}
    for brings, found in checked.items():  # poor batches check less than good ones, whatever a single draft says
        for _ in range(60):
            sizes, counts = batch.step(shares, [brings] * 3)
            found.append(counts[0] if counts else 0)
    assert sum(checked[1][20:]) < sum(checked[12][20:]) / 2


def test_a_batch_reviews_its_first_decision_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before anything was known; later ones hold for some rounds."""
    asked = count_forecasts(monkeypatch, "best_check")
    batch, counts = Batch(make_pilot(PADDED), BUCKETS), []
    batch.join(3)
    for _ in range(2 + REVIEW):
        before = len(asked)
        batch.step([0.9] * 3, [3] * 3)
        counts.append(len(asked) - before)
    assert counts == [1, 1, *[0] * (REVIEW - 1), 1]


def test_without_buckets_each_request_of_a_batch_decides_alone() -> None:
    batch = Batch(make_pilot(PADDED))
    batch.join(3)
    _, counts = batch.step([0.95, 0.5, 0.05], [1] * 3)
    assert len(set(counts)) == 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_buckets_of_the_engine_decide_and_not_those_the_costs_were_measured_with(batch_size: int) -> None:
    free, buckets, counts = StepCosts.linear(slope=0.05), (1, 6, 9, 65), []
    for costs in (free, replace(free, padding=(1, 64))):
        pilot, inputs = make_pilot(costs), make_inputs(batch_size=batch_size)
        assert choose_one(pilot, inputs, pilot.start(None)).num_nodes is None
        counts.append(choose_one(pilot, inputs._replace(buckets=buckets), pilot.start(None)).num_nodes)
    assert counts[0] == counts[1] and counts[0] in (5, 8)


@pytest.mark.parametrize("is_chain", [False, True])
def test_as_many_nodes_are_selected_as_were_chosen(is_chain: bool) -> None:
    pilot, inputs = make_pilot(PADDED, is_chain=is_chain), make_inputs(buckets=BUCKETS)
    memory = pilot.start(None)
    choice = choose_one(pilot, inputs, memory)
    assert choice.num_nodes and choice.is_chain == is_chain and choice.calibrations is pilot.calibrations
    for share in (0.95, 0.05):  # whatever the draft says
        tree = select_one(pilot, inputs, sure_draft(share, choice.draft_size - 1), memory, choice).tree
        assert len(tree) - 1 == min(choice.num_nodes, choice.draft_size - 1 if is_chain else 99)


def test_a_padded_batch_that_drafts_poorly_decodes_plainly_and_probes() -> None:
    batch = Batch(make_pilot(StepCosts.linear(draft=0.5, slope=0.2)), (1, 2, 4, 8))
    batch.join(4)
    rounds = [batch.step([0.05] * 4, [1] * 4)[0] for _ in range(80)]
    drafted = [bool(sizes[0]) for sizes in rounds]
    assert all(len(set(sizes)) == 1 for sizes in rounds)
    assert 1 < drafted.count(True) < 20 and not drafted[-1]


def test_a_batch_forgets_when_its_last_request_has_gone() -> None:
    batch = Batch(make_pilot(PADDED), BUCKETS)
    batch.join(2)
    fresh, _ = batch.step([0.9] * 2, [1] * 2)
    drafted = [bool(batch.step([0.05] * 2, [1] * 2)[0][0]) for _ in range(60)]
    assert fresh[0] and sum(drafted[-30:]) < 6
    batch.join()  # those who know better
    drafted = [bool(batch.step([0.05] * 3, [1] * 3)[0][0]) for _ in range(30)]
    assert sum(drafted) < 6
    batch.leave(0)
    batch.leave(0)
    batch.join()  # it was joined itself, and hands on what it was told
    assert batch.memories[0].batch is batch.memories[1].batch and batch.memories[1].batch.recent.has_drafted
    batch.leave(0)
    batch.leave(0)
    batch.join(2)
    assert batch.step([0.9] * 2, [1] * 2)[0] == fresh


def test_who_joins_a_batch_that_rests_will_not_draft_at_once() -> None:
    pilot = make_pilot(PADDED)
    first = pilot.start(None)
    assert not pilot.rests([]) and not pilot.rests([first])
    assert first.batch is not None
    first.batch.gate.is_closed = True
    assert pilot.rests([first, pilot.start(None, [first])])


def test_the_memory_of_a_batch_lives_as_long_as_one_of_its_requests() -> None:
    pilot = make_pilot(PADDED)
    first = pilot.start(None, neighbours=())
    second = pilot.start(None, neighbours=[first])
    assert second.batch is first.batch is not None and second.recent is not first.recent
    stranger = pilot.start(None, neighbours=())
    assert stranger.batch is not first.batch and stranger.batch == StepMemory() == pilot.start(None).batch
    known = weakref.ref(first.batch)
    del first
    gc.collect()
    assert known() is second.batch
    del second
    gc.collect()
    assert known() is None, "nothing else holds it: not the pilot, and no list of those who have asked"


def stand_after_a_decision(costs: StepCosts, num_steps: int) -> Batch:
    """Two requests in the middle of what they have decided together."""
    batch = Batch(make_pilot(costs), BUCKETS)
    batch.join(2)
    for _ in range(num_steps):
        batch.step([0.05] * 2, [1] * 2)
    return batch


@pytest.mark.parametrize(
    ("costs", "num_steps"),
    [(PADDED, 2), (StepCosts.linear(draft=0.5, slope=0.2), 2 * REVIEW)],
    ids=["a size that is kept", "plain steps"],
)
def test_who_joins_takes_the_decision_that_stands_and_uses_up_nothing(costs: StepCosts, num_steps: int) -> None:
    """The others have been asked for the step already, and are not asked again."""
    batch = stand_after_a_decision(costs, num_steps)
    shared = batch.memories[0].batch
    assert shared.num_kept or (shared.gate.is_closed and shared.gate.num_plain)
    before = replace(shared, recent=replace(shared.recent), gate=replace(shared.gate))
    batch.join()
    choice = choose_one(batch.pilot, batch.inputs(2), batch.memories[2])
    assert choice == shared.choice and shared == before


def test_who_joins_does_not_use_up_a_probe() -> None:
    batch = stand_after_a_decision(StepCosts.linear(draft=0.5, slope=0.2), 2 * REVIEW)
    shared = batch.memories[0].batch
    assert shared.gate.is_closed
    while shared.gate.num_plain < shared.gate.wait:
        assert batch.step([0.05] * 2, [1] * 2)[0] == [0, 0]
    batch.join()
    assert choose_one(batch.pilot, batch.inputs(2), batch.memories[2]) == PLAIN
    assert shared.gate.num_plain == shared.gate.wait == FIRST_WAIT
    assert batch.step([0.05] * 3, [1] * 3)[0] != [0] * 3, "the probe is still due"


def test_the_first_requests_of_a_batch_decide() -> None:
    batch = Batch(make_pilot(PADDED), BUCKETS)
    batch.join(2)
    assert batch.memories[0].batch.choice == PLAIN
    assert min(batch.step([0.9] * 2, [1] * 2)[0]) > 1


def test_a_request_left_alone_goes_on_from_what_the_batch_has_seen() -> None:
    batch = Batch(make_pilot(PADDED), BUCKETS)
    batch.join(2)
    for _ in range(20):
        batch.step([0.9] * 2, [9] * 2)
    batch.leave(1)
    batch.step([0.9], [9])
    (memory,) = batch.memories
    assert memory.recent.average > 4 and memory.recent is not memory.batch.recent


def drive(pilot: StepPilot, shares: list[float]) -> list[bool]:
    """Whether each step drafted, when drafts are as sure as told and come true on the whole."""
    batch = Batch(pilot)
    batch.join()
    return [batch.step([share], [1 + round(share / (1 - share))])[0][0] > 0 for share in shares]


def test_where_drafting_cannot_win_it_is_not_even_tried() -> None:
    assert not any(drive(make_pilot(SATURATED), [0.9] * 200))


def test_a_poor_drafter_is_left_and_probed_ever_more_rarely() -> None:
    drafted = drive(make_pilot(StepCosts.linear(draft=0.4, slope=0.1)), [0.05] * 600)
    gaps = np.diff(np.flatnonzero(drafted))
    waits = gaps[gaps > 1] - 1
    assert drafted[0] and set(waits) == {8, 16, 32, 64, LAST_WAIT} and FIRST_WAIT == 8
    assert (np.diff(waits) >= 0).all()


def test_drafting_returns_when_a_probe_goes_well() -> None:
    drafted = drive(make_pilot(StepCosts.linear(draft=0.4, slope=0.1)), [0.05] * 60 + [0.9] * 120)
    assert not all(drafted[40:60]) and all(drafted[-40:])


def test_equal_inputs_give_equal_decisions_and_requests_remember_nothing_of_earlier_ones() -> None:
    pilot = make_pilot(STEEP)
    shares = [0.05] * 30 + [0.8] * 30
    first = drive(pilot, shares)
    drive(pilot, [0.9] * 9)
    assert first == drive(pilot, shares)
    assert pilot.start(None) == StepMemory(batch=StepMemory()) and pilot.start(None).recent == Recent()


def test_a_batch_drafts_together_or_not_at_all_also_where_nothing_is_padded() -> None:
    """One request that drafts holds up all the others."""
    pilot = make_pilot(STEEP)
    batch = Batch(pilot)
    batch.join(3)
    for _ in range(40):
        inputs = make_inputs(batch_size=3)
        choices = pilot.choose([Asked(memory, inputs) for memory in batch.memories])
        assert len(set(choices)) == 1
        batch.step([0.9, 0.05, 0.05], [9, 1, 1])
    assert all(memory.recent == Recent() for memory in batch.memories), "what is learned is the batch's"


def test_sizes_stay_within_the_drafter_and_nodes_within_the_answer() -> None:
    pilot = make_pilot(FLAT)
    assert 1 < choose_one(pilot, make_inputs(max_block_size=8), pilot.start(None)).draft_size <= 8
    assert choose_one(pilot, make_inputs(max_block_size=3), pilot.start(None)) == PLAIN
    assert count_nodes(make_pilot(FLAT, is_chain=True), make_inputs(num_remaining=4), sure_draft(0.9)) == 3
    empty: HostDraft = Draft(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert count_nodes(pilot, make_inputs(), empty) == 0
    tree = select_one(pilot, make_inputs(num_remaining=3), sure_draft(0.5), pilot.start(None)).tree
    assert tree.max_depth == 2 and len(tree) == 64


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_drafters_own_tree_is_pruned(is_chain: bool) -> None:
    log_probs = np.log(np.array([0.9, 0.05, 0.8], dtype=np.float32))
    tree = DraftTree.build(9, [(0, 5), (0, 6), (1, 7)])
    draft: HostDraft = Draft(np.array([[5], [7]]), log_probs[[0, 2], None], tree=tree, node_log_probs=log_probs)
    pilot = make_pilot(STEEP, is_chain=is_chain)
    found = select_one(pilot, make_inputs(), draft, pilot.start(None))
    assert found.tree == DraftTree.chain(9, [5, 7]) and found.head == pytest.approx([0.9, 0.72])
    short = select_one(pilot, make_inputs(num_remaining=2), draft, pilot.start(None))
    assert short.tree == DraftTree.chain(9, [5])


def test_requests_of_a_batch_are_calibrated_by_their_own_temperature() -> None:
    doubt = Calibration(np.array([[-2.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=np.float32))
    pilot = StepPilot(Calibration.identity(), PADDED, sampled=doubt)
    batch = Batch(pilot, BUCKETS)
    batch.join(3)
    asked = [
        Asked(memory, batch.inputs(row, temperature=0.7 * (row == 1))) for row, memory in enumerate(batch.memories)
    ]
    choices = pilot.choose(asked)
    drafts = [sure_draft(0.8, choice.draft_size - 1) for choice in choices]
    found = pilot.select(
        [Drafted(*one, choice, draft, 9) for one, choice, draft in zip(asked, choices, drafts, strict=True)]
    )
    assert found[0] == found[2] and found[1].head[0] == pytest.approx(1 / (1 + np.exp(2) / 4), rel=1e-3)
    assert found[0].head[0] == pytest.approx(0.8, rel=1e-3) and found[1].promised < found[0].promised


def test_bad_sizes_and_forecasts_are_refused() -> None:
    with pytest.raises(InputError, match="must rise from 2"):
        make_pilot(FLAT, draft_sizes=(8, 4))
    with pytest.raises(InputError, match=r"is for .*\(4, 8\).* the pilot for .*\(4, 8, 16\)"):
        make_pilot(FLAT, forecast=Forecast((4, 8)))
    with pytest.raises(InputError, match="shape"):
        Forecast((4, 8), weights=np.zeros((1, 2, 3), dtype=np.float32))


@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "eagle3", "ngram"])
def test_the_text_is_the_plain_text(drafter: str) -> None:
    models = {"dflash": make_dflash, "dflash2": lambda: make_dflash(is_second=True), "eagle3": make_eagle3}
    llm = make_llm(drafter=models[drafter]() if drafter in models else "ngram", costs=FLAT)
    random = np.random.default_rng(0)
    strange = Calibration(random.normal(size=(4, 6)).astype(np.float32))
    pilots = ["auto", "step", "chain-step", StepPilot(strange, StepCosts.linear(slope=0.05))]
    for params in (
        SamplingParams(max_new_tokens=28, ignore_eos=True),
        SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3),
    ):
        plain = llm.generate(PROMPTS, params, pilot="ar", is_raw=True)
        for pilot in pilots:
            drafted = llm.generate(PROMPTS, params, pilot=pilot, is_raw=True)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
            assert any(step.verify_size > 1 for c in drafted for step in c.steps)


@pytest.mark.parametrize("shift", [0, 1])
def test_online_a_right_drafter_is_used_and_a_wrong_one_left(shift: int) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain = make_llm().generate(PROMPTS[:1], params, is_raw=True)[0]
    prompt_ids = tuple(make_llm().tokenizer.encode(PROMPTS[0]))
    drafter = ScriptedDrafter({prompt_ids: plain.token_ids}, shift=shift)
    llm = make_llm(drafter=drafter, costs=StepCosts.linear(draft=0.2, slope=0.05))
    drafted = llm.generate(PROMPTS[:1], params, pilot="chain-step", is_raw=True)[0]
    assert drafted.token_ids == plain.token_ids
    assert (drafted.num_steps < 12) if shift == 0 else (sum(s.block_size == 1 for s in drafted.steps) > 30)


def test_names_and_options() -> None:
    assert [make_pilot(FLAT).name, make_pilot(FLAT, is_chain=True).name] == ["step", "chain-step"]
    assert make_pilot(FLAT, label="auto").name == "auto"
    pilot = make_pilot(FLAT, draft_sizes=(4, 12), is_chain=True)
    assert [choice.draft_size for choice in pilot.options(8)] == [4, 12]
    assert all(choice.is_chain and choice.calibrations is pilot.calibrations for choice in pilot.options(8))


@pytest.mark.parametrize("seed", range(6))
def test_rates_of_draft_sizes_are_tokens_over_milliseconds(seed: int) -> None:
    """Written out: each level checks its best number of nodes; tokens of all levels over milliseconds of all."""
    random = np.random.default_rng(seed)
    weights = (random.normal(size=(3, 3, 63, 5)) * [0.5, 0.2, 0.2, 0.2, 0.5]).astype(np.float32)
    costs = StepCosts.linear(draft=0.2, slope=random.choice([0.0, 0.01, 0.1]))
    forecast = Forecast((4, 8, 16), weights=weights)
    step_ms = np.array([[costs.step_ms(size, n + 1) for n in range(64)] for size in (4, 8, 16)])
    scale = float(random.uniform(0.3, 1.5))
    for count in (1, 2, 3):  # sizes that the drafter can do
        expected, rates, means = np.minimum(1 + scale * (forecast.expected(Recent())[:count] - 1), 30), [], []
        expected = np.minimum.accumulate(expected[::-1], axis=0)[::-1]  # a larger draft shows what a smaller one does
        for curves, ms in zip(expected, step_ms, strict=False):
            counts = [int((level / ms).argmax()) for level in curves]
            tokens = sum(level[number] for level, number in zip(curves, counts, strict=True))
            rates.append(tokens / sum(ms[number] for number in counts))
            means.append(tokens / len(curves))
        best = count - 1
        for index in range(count - 2, -1, -1):
            best = index if rates[index] > SIZE_MARGIN * rates[best] else best
        found = forecast.best_size(Recent(), step_ms, count, 30, scale)
        assert found == (best, pytest.approx(rates[best]), pytest.approx(means[best]))


@pytest.mark.parametrize("seed", range(6))
def test_draft_size_and_nodes_decided_together_bring_most(seed: int) -> None:
    """Written out: the mean of all levels, scaled, over the milliseconds of every size and number of nodes."""
    random = np.random.default_rng(seed)
    weights = (random.normal(size=(3, 3, 63, 5)) * [0.5, 0.2, 0.2, 0.2, 0.5]).astype(np.float32)
    forecast, scale = Forecast((4, 8, 16), weights=weights), float(random.uniform(0.3, 1.5))
    step_ms = 1 + random.choice([0.0, 0.01, 0.2], size=(3, 64)).cumsum(axis=-1)
    tokens = 1 + scale * (forecast.expected(Recent()).mean(axis=1) - 1)
    for count in (1, 2, 3):
        rates = np.minimum.accumulate(tokens[:count][::-1], axis=0)[::-1] / step_ms[:count]
        best = count - 1
        for index in range(count - 2, -1, -1):
            best = index if rates[index].max() > CHECK_MARGIN * rates[best].max() else best
        nodes = int(rates[best].argmax())
        found = forecast.best_check(Recent(), step_ms, count, scale)
        assert found == (best, nodes, pytest.approx(rates[best, nodes]))
