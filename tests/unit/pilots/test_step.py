"""The adaptive pilot: where it stops, when it gives up, and that it changes no token."""

from dataclasses import replace

import numpy as np
import pytest

from blockpilot import SamplingParams
from blockpilot.core.candidates import Candidates, ProposedTree
from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.forecast import Forecast, Recent
from blockpilot.pilots.gate import FIRST_WAIT, LAST_WAIT
from blockpilot.pilots.step import REVIEW, StepPilot
from tests.tiny import ScriptedDrafter, make_dflash, make_eagle3, make_llm
from tests.unit.pilots.pieces import make_inputs, sure_candidates

FLAT = StepCosts.linear(draft=0.15, fixed=1.0, slope=0.0)
STEEP = StepCosts.linear(draft=0.15, fixed=1.0, slope=0.2)
SATURATED = StepCosts.linear(draft=0.15, fixed=0.5, slope=0.5)
PROMPTS = ["the quick brown fox", "abcabcabcabcabcabc", "Z", "speculation is cheap and proof is dear 0123"]


def make_pilot(costs: StepCosts, **options: object) -> StepPilot:
    return StepPilot(Calibration.identity(), costs, **options).start(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_chain", [False, True])
def test_it_checks_as_much_as_pays(is_chain: bool) -> None:
    sizes = []
    for costs in (FLAT, StepCosts.linear(slope=0.05), STEEP, SATURATED):
        pilot = make_pilot(costs, is_chain=is_chain)
        sizes.append(len(pilot.select(make_inputs(), sure_candidates(0.7))))
    assert sizes[0] == (15 if is_chain else 63)
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < 6 and sizes[3] == 0


def test_the_peak_of_a_steep_curve_is_met() -> None:
    pilot = make_pilot(STEEP, is_chain=True)
    nodes = pilot.select(make_inputs(), sure_candidates(0.8))
    rates = [sum(0.8**k for k in range(n + 1)) / STEEP.step_ms(16, n + 1) for n in range(16)]
    assert len(nodes) == int(np.argmax(rates))


def test_a_sure_drafter_is_asked_for_more_than_a_poor_one() -> None:
    chosen = {}
    for share in (0.3, 0.95):
        pilot = make_pilot(StepCosts.linear(draft=0.2, slope=0.01), is_chain=True)
        emitted = 0
        for _ in range(4 * REVIEW + 1):
            inputs = make_inputs(last_emitted=emitted)
            chosen[share] = pilot.choose(inputs)
            nodes = pilot.select(inputs, sure_candidates(share, depth=max(chosen[share], 2) - 1))
            emitted = 1 + (len(nodes) if share > 0.9 else 0)
    assert chosen[0.95] == 16 and chosen[0.3] < 16


def test_a_draft_size_holds_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    best_size = Forecast.best_size
    monkeypatch.setattr(Forecast, "best_size", lambda *given: asked.append(1) or best_size(*given))
    pilot = make_pilot(StepCosts.linear(draft=0.2, slope=0.01))
    for _ in range(2):  # a new request asks anew
        own = pilot.start(None)
        for _ in range(REVIEW + 1):
            inputs = make_inputs(last_emitted=3)
            own.select(inputs, sure_candidates(0.8, depth=own.choose(inputs) - 1))
    assert len(asked) == 4


def test_a_kept_draft_size_ends_with_a_lower_limit_and_in_a_batch() -> None:
    pilot = make_pilot(StepCosts.linear(draft=0.2, slope=0.01))
    assert pilot.choose(make_inputs()) == 16
    assert pilot.choose(make_inputs()._replace(max_block_size=3)) == 0
    own = make_pilot(PADDED).start(None)
    assert own.choose(make_inputs()) and own._num_kept
    own.choose(make_inputs(batch_size=2))
    assert not own._num_kept


def test_a_busier_batch_checks_less() -> None:
    candidates = sure_candidates(0.7)
    sizes = [len(make_pilot(STEEP).select(make_inputs(batch_size=n), candidates)) for n in (1, 2, 8)]
    assert sizes[0] > sizes[1] >= sizes[2]


def round_of(pilots: list[StepPilot], emitted: list[int], shares: list[float]) -> tuple[list[int], list[int]]:
    """Draft sizes and numbers of nodes of a batch, when its drafts are as sure as told."""
    inputs = [make_inputs(batch_size=len(pilots), last_emitted=count) for count in emitted]
    sizes = [pilot.choose(one) for pilot, one in zip(pilots, inputs, strict=True)]
    drafting = [row for row, size in enumerate(sizes) if size]
    nodes = [pilots[row].select(inputs[row], sure_candidates(shares[row], depth=sizes[row] - 1)) for row in drafting]
    return sizes, [len(found) for found in nodes]


PADDED = replace(StepCosts.linear(draft=0.2, slope=0.03), padding=(1, 2, 4, 8, 16, 32, 64))


def test_requests_of_a_padded_batch_take_one_size_and_learn_from_each_other() -> None:
    first = StepPilot(Calibration.identity(), PADDED)
    pilots = [first.start(None) for _ in range(3)]
    shares, emitted = [0.95, 0.5, 0.05], [0, 0, 0]
    sizes, counts = round_of(pilots, emitted, shares)
    assert len(set(sizes)) == 1 and len(set(counts)) == 1 and counts[0] + 1 in PADDED.padding
    checked: dict[int, list[int]] = {12: [], 1: []}
    for brings, found in checked.items():  # poor batches check less than good ones, whatever a single draft says
        for _ in range(60):
            sizes, counts = round_of(pilots, [min(brings, 1 + count) for count in counts or [0] * 3], shares)
            found.append(counts[0] if counts else 0)
    assert sum(checked[1][20:]) < sum(checked[12][20:]) / 2


def test_a_batch_reviews_its_first_decision_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before anything was known; later ones hold for some rounds."""
    first, asked = StepPilot(Calibration.identity(), PADDED), [0]
    best_check = Forecast.best_check

    def note(self: Forecast, *given: object) -> tuple[int, int, float]:
        asked[-1] += 1
        return best_check(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Forecast, "best_check", note)
    pilots = [first.start(None) for _ in range(3)]
    for _ in range(2 + REVIEW):
        round_of(pilots, [3] * 3, [0.9] * 3)
        asked.append(0)
    assert asked[:-1] == [1, 1, *[0] * (REVIEW - 1), 1]


def test_without_padding_each_request_of_a_batch_decides_alone() -> None:
    first = StepPilot(Calibration.identity(), StepCosts.linear(draft=0.2, slope=0.03))
    _, counts = round_of([first.start(None) for _ in range(3)], [0, 0, 0], [0.95, 0.5, 0.05])
    assert len(set(counts)) == 3


def test_a_padded_batch_that_drafts_poorly_decodes_plainly_and_probes() -> None:
    first = StepPilot(Calibration.identity(), replace(StepCosts.linear(draft=0.5, slope=0.2), padding=(1, 2, 4, 8)))
    pilots = [first.start(None) for _ in range(4)]
    rounds = [round_of(pilots, [1] * 4, [0.05] * 4)[0] for _ in range(80)]
    drafted = [bool(sizes[0]) for sizes in rounds]
    assert all(len(set(sizes)) == 1 for sizes in rounds)
    assert drafted.count(True) < 20 and not drafted[-1]


def test_a_batch_forgets_when_its_last_request_has_gone() -> None:
    first = StepPilot(Calibration.identity(), PADDED)
    pilots = [first.start(None) for _ in range(2)]
    fresh, _ = round_of(pilots, [0, 0], [0.9, 0.9])
    drafted = [bool(round_of(pilots, [1, 1], [0.05, 0.05])[0][0]) for _ in range(60)]
    assert fresh[0] and sum(drafted[-30:]) < 6
    pilots.append(first.start(None))  # joins those who know better
    drafted = [bool(round_of(pilots, [1, 1, 1], [0.05] * 3)[0][0]) for _ in range(30)]
    assert sum(drafted) < 6
    pilots.clear()
    again = [first.start(None) for _ in range(2)]
    assert round_of(again, [0, 0], [0.9, 0.9])[0] == fresh
    assert again[0].choose(make_inputs()) == first.start(None).choose(make_inputs())


def test_a_request_left_alone_goes_on_from_what_the_batch_has_seen() -> None:
    first = StepPilot(Calibration.identity(), PADDED)
    pilots = [first.start(None) for _ in range(2)]
    for _ in range(20):
        round_of(pilots, [9, 9], [0.9, 0.9])
    pilots[0].choose(make_inputs(last_emitted=9))
    assert pilots[0].recent.average > 4


def drive(pilot: StepPilot, shares: list[float]) -> list[bool]:
    """Whether each step drafted, when drafts are as sure as told and come true on the whole."""
    drafted, emitted = [], 0
    for number, share in enumerate(shares):
        inputs = make_inputs(last_emitted=emitted, num_steps=number)
        size = pilot.choose(inputs)
        drafted.append(size > 0)
        emitted = 1
        if size:
            nodes = pilot.select(inputs, sure_candidates(share, depth=size - 1))
            emitted += min(len(nodes), round(share / (1 - share)))
    return drafted


def test_where_drafting_cannot_win_it_is_not_even_tried() -> None:
    assert not any(drive(make_pilot(SATURATED), [0.9] * 200))


def test_a_poor_drafter_is_left_and_probed_ever_more_rarely() -> None:
    drafted = drive(make_pilot(StepCosts.linear(draft=0.4, slope=0.1)), [0.05] * 300)
    gaps = np.diff(np.flatnonzero(drafted))
    waits = gaps[gaps > 1] - 1
    assert drafted[0] and set(waits) == {FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, LAST_WAIT}
    assert (np.diff(waits) >= 0).all()


def test_drafting_returns_when_a_probe_goes_well() -> None:
    drafted = drive(make_pilot(StepCosts.linear(draft=0.4, slope=0.1)), [0.05] * 60 + [0.9] * 120)
    assert not all(drafted[40:60]) and all(drafted[-40:])


def test_equal_inputs_give_equal_decisions_and_requests_do_not_share_memory() -> None:
    pilot = StepPilot(Calibration.identity(), STEEP)
    shares = [0.05] * 30 + [0.8] * 30
    first = drive(pilot.start(None), shares)
    other = pilot.start(None)
    drive(other, [0.9] * 9)
    assert first == drive(pilot.start(None), shares)
    assert (pilot.recent, pilot.start(None).recent) == (Recent(), Recent())


def test_sizes_stay_within_the_drafter_and_nodes_within_the_answer() -> None:
    pilot = make_pilot(FLAT)
    assert pilot.choose(make_inputs(max_block_size=8)) <= 8
    assert make_pilot(FLAT).choose(make_inputs(max_block_size=3)) == 0
    nodes = make_pilot(FLAT, is_chain=True).select(make_inputs(num_remaining=4), sure_candidates(0.9))
    assert len(nodes) == 3
    empty = Candidates(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.float32))
    assert make_pilot(FLAT).select(make_inputs(), empty) == []


@pytest.mark.parametrize("is_chain", [False, True])
def test_the_tree_is_that_of_the_selected_nodes(is_chain: bool) -> None:
    for num_remaining in (2, 5, 100):
        inputs, candidates = make_inputs(num_remaining=num_remaining), sure_candidates(0.7)
        pilots = [make_pilot(STEEP, is_chain=is_chain) for _ in range(2)]
        nodes = pilots[0].select(inputs, candidates)
        assert pilots[1].select_tree(inputs, candidates, 9) == DraftTree.build(9, nodes)
        assert pilots[0].recent == pilots[1].recent


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_drafters_own_tree_is_pruned(is_chain: bool) -> None:
    log_probs = np.log(np.array([0.9, 0.05, 0.8], dtype=np.float32))
    tree = ProposedTree(np.array([0, 0, 1]), np.array([5, 6, 7]), log_probs)
    candidates = Candidates(np.array([[5], [7]]), log_probs[[0, 2], None], tree=tree)
    pilot = make_pilot(STEEP, is_chain=is_chain)
    assert pilot.select(make_inputs(), candidates) == [(0, 5), (1, 7)]
    assert pilot.select_tree(make_inputs(), candidates, 9) == DraftTree.build(9, [(0, 5), (1, 7)])
    assert pilot.select_tree(make_inputs(num_remaining=2), candidates, 9) == DraftTree.build(9, [(0, 5)])
    assert pilot.recent.expected > 2


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
            assert any(step.block_size > 1 for c in drafted for step in c.steps)


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


def test_names() -> None:
    assert [make_pilot(FLAT).name, make_pilot(FLAT, is_chain=True).name] == ["step", "chain-step"]
    assert make_pilot(FLAT, label="auto").name == "auto"


@pytest.mark.parametrize("seed", range(6))
def test_rates_of_draft_sizes_are_tokens_over_milliseconds(seed: int) -> None:
    """Written out: each level checks its best number of nodes; tokens of all levels over milliseconds of all."""
    random = np.random.default_rng(seed)
    weights = (random.normal(size=(3, 3, 63, 5)) * [0.5, 0.2, 0.2, 0.2, 0.5]).astype(np.float32)
    costs = StepCosts.linear(draft=0.2, slope=random.choice([0.0, 0.01, 0.1]))
    pilot = make_pilot(costs, forecast=Forecast((4, 8, 16), weights=weights))
    table = pilot._tables.at(1, 20)
    expected = np.minimum(pilot._forecast.expected(pilot.recent), 30)
    for index in (1, 0):
        expected[index] = np.minimum(expected[index], expected[index + 1])
    for index, rate in enumerate(pilot._forecast.rates(pilot.recent, table.step_ms, 30)):
        counts = [int((level / table.step_ms[index]).argmax()) for level in expected[index]]
        tokens = sum(level[count] for level, count in zip(expected[index], counts, strict=True))
        assert rate == pytest.approx(tokens / sum(costs.step_ms((4, 8, 16)[index], count + 1) for count in counts))
